"""A student and its frozen teacher: the same crops through both, and the student's outputs in the teacher's width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from selectivit.features import preprocessing
from selectivit.models.veca import Veca
from selectivit.swap.learn_scale import LearntScale
from selectivit.swap.sites import Preprocessing
from selectivit.train.plain_attention import plain_attention
from selectivit.train.tokens import DenseTokens, dense_tokens, normalise, project, to_grid

CACHED_TOKENS = 2048
"""Tokens that a teacher on the CPU sees at once: their activations stay in the cache, for 0.8 of the time."""


class Pair(nn.Module):
    """What is trained, beside what it is trained on. The teacher is no submodule: it is neither trained nor saved.

    Args:
        student: any model that `features` knows, swapped or not, or a core-periphery model.
        teacher: likewise.
        sizes: image sizes of the run, to find out now whether the two fit.
        grid: "refuse" or "interpolate" grids that differ.
        learn_scale: train the factors of the student's swap too.

    Raises:
        ValueError: grids that differ where that is refused, or a model that gives no tokens.

    Example:
        >>> import torchvision
        >>> vits = [torchvision.models.VisionTransformer(32, 16, 1, 2, width, 32) for width in (16, 24)]
        >>> Pair(*vits, sizes=[32], grid="refuse").head
        Linear(in_features=16, out_features=24, bias=True)
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        *,
        sizes: Sequence[int],
        grid: str,
        learn_scale: bool = False,
    ):
        super().__init__()
        self.student, self.grid = student, grid
        self.learnt = LearntScale(student) if learn_scale else None
        self._teacher = (teacher.eval().requires_grad_(False),)
        self.expects = {"student": preprocessing(student), "teacher": preprocessing(teacher)}
        for size in sizes:
            grids = [round(size / expected.patch_size) for expected in self.expects.values()]
            if grid == "refuse" and grids[0] != grids[1]:
                raise ValueError(
                    f"at {size} px the student has {grids[0]} x {grids[0]} patches and the teacher {grids[1]} x "
                    f"{grids[1]}: take models of the same patch size, or allow grid='interpolate'"
                )
        widths = width_of(student), width_of(teacher)
        self.width = widths[1]
        self.head = nn.Identity() if widths[0] == widths[1] else nn.Linear(widths[0], widths[1])
        if isinstance(self.head, nn.Linear):
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    @property
    def teacher(self) -> nn.Module:
        """The frozen model."""
        return self._teacher[0]

    @property
    def num_cores(self) -> int | None:
        """The size of the student's core bank; None for a model without cores."""
        return self.student.config.num_cores if isinstance(self.student, Veca) else None

    def teach(self, images: Tensor) -> DenseTokens:
        """The teacher's tokens.

        Args:
            images: (B, 3, H, W) uint8.

        Returns:
            Without gradients.
        """
        expected = self.expects["teacher"]
        tokens = _tokens(images, expected)
        few = max(1, CACHED_TOKENS // tokens) if images.device.type == "cpu" else len(images)
        with torch.no_grad(), plain_attention(images.device, tokens):
            parts = [
                dense_tokens(self.teacher, normalise(part, expected.mean, expected.std)) for part in images.split(few)
            ]
        whole = torch.cat([part.global_token for part in parts])
        return DenseTokens(whole, torch.cat([part.patch_tokens for part in parts]), parts[0].grid)

    def study(self, images: Tensor, num_cores: int | None = None) -> DenseTokens:
        """The student's tokens in the teacher's width.

        Args:
            images: (B, 3, H, W) uint8.
            num_cores: the budget; None is all cores, or a model without.

        Returns:
            With gradients, unless the caller turned them off.
        """
        if self.learnt is not None:
            self.learnt.put()
        expected = self.expects["student"]
        with plain_attention(images.device, _tokens(images, expected)):
            tokens = dense_tokens(self.student, normalise(images, expected.mean, expected.std), num_cores)
        return project(tokens, self.head)

    def both(
        self, images: Tensor, num_cores: int | None = None, taught: DenseTokens | None = None
    ) -> tuple[DenseTokens, DenseTokens]:
        """Student's and teacher's tokens of the same images, on the student's grid; `taught` are known ones."""
        teacher = self.teach(images) if taught is None else taught
        student = self.study(images, num_cores)
        return student, to_grid(teacher, student.grid, self.grid)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The student in evaluation mode, without gradients, for a while."""
        before = self.student.training
        self.student.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.student.train(before)


def width_of(model: nn.Module) -> int:
    """The width of a model's tokens, found with one small image.

    Args:
        model: any that `dense_tokens` knows.

    Returns:
        C.

    Example:
        >>> import torchvision
        >>> width_of(torchvision.models.VisionTransformer(32, 16, 1, 2, 24, 32))
        24
    """
    expected, weight, mode = preprocessing(model), next(model.parameters()), model.training
    with torch.no_grad():
        tokens = dense_tokens(model.eval(), torch.zeros(1, 3, *expected.image_size, device=weight.device))
    model.train(mode)
    return tokens.patch_tokens.shape[-1]


def _tokens(images: Tensor, expected: Preprocessing) -> int:
    return images.shape[-2] * images.shape[-1] // expected.patch_size**2
