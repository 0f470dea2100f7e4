"""DINO's student and teacher, each a ViT with a projection head; the teacher is a running mean of the student."""

from __future__ import annotations

import warnings

import torch
from lightly.models.modules.heads import DINOProjectionHead
from lightly.models.utils import update_momentum
from torch import Tensor, nn

from selectivit.data.seeding import derived_seed, seeded
from selectivit.features import preprocessing
from selectivit.layers.drop_path import DropPath
from selectivit.models.create import create_model
from selectivit.train.dino_settings import DinoSettings
from selectivit.train.plain_attention import plain_attention
from selectivit.train.tokens import normalise


class DinoPair(nn.Module):
    """What is trained, beside its running mean; both start with the same weights.

    Args:
        settings: of the run.

    Raises:
        ValueError: an unknown model, or crops that are no whole patches.

    Source: DINO, arXiv 2104.14294.
    """

    def __init__(self, settings: DinoSettings):
        super().__init__()
        given = {name: getattr(settings, name) for name in ("attention", "registers", "specialization")}
        given["image_size"] = settings.crops.global_size
        with seeded(derived_seed(settings.seed, "weights")):
            self.student = create_model(settings.model, **given, drop_path=settings.drop_path)
            self.student_head = make_head(self.student.embed_dim, settings)  # pyright: ignore[reportArgumentType]
            self.teacher = create_model(settings.model, **given)
            self.teacher_head = make_head(self.teacher.embed_dim, settings)  # pyright: ignore[reportArgumentType]
        self.expects = preprocessing(self.student)
        side = self.expects.patch_size
        if settings.crops.num_local and settings.crops.local_size % side:
            raise ValueError(
                f"expected small crops in whole patches of {side} px, got {settings.crops.local_size}: "
                f"{max(1, round(settings.crops.local_size / side)) * side} is one"
            )
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher_head.load_state_dict(self.student_head.state_dict())
        self.teacher.requires_grad_(False)
        self.teacher_head.requires_grad_(False)
        self.drops = [module for module in self.student.modules() if isinstance(module, DropPath)]

    def trained(self) -> list[nn.Parameter]:
        """The student's parameters and those of its head, without the frozen ones."""
        return [p for part in (self.student, self.student_head) for p in part.parameters() if p.requires_grad]

    def teach(self, large: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher on the large crops.

        Args:
            large: (2, B, 3, G, G) uint8.

        Returns:
            Class tokens (2 B, C) and outputs (2 B, K), view by view, without gradients.
        """
        with torch.no_grad():
            tokens = self._class_tokens(self.teacher, large)
            return tokens, self.teacher_head(tokens)

    def study(self, large: Tensor, small: Tensor, numbers: Tensor | None = None) -> Tensor:
        """The student on all crops, those of a size at once.

        Args:
            large: (2, B, 3, G, G) uint8.
            small: (S, B, 3, L, L) uint8.
            numbers: (layers, 2 + S, B) in [0, 1), on which stochastic depth decides; None draws them.

        Returns:
            Outputs ((2 + S) B, K), view by view.
        """
        tokens, place = [], 0
        for crops in (large, small):
            for layer, drop in enumerate(self.drops):
                drop.numbers = None if numbers is None else numbers[layer, place : place + len(crops)].flatten()
            if len(crops):
                tokens.append(self._class_tokens(self.student, crops))
            place += len(crops)
        return self.student_head(torch.cat(tokens))

    def represent(self, images: Tensor) -> Tensor:
        """The teacher's class tokens of whole photos.

        Args:
            images: (B, 3, H, W) uint8.

        Returns:
            (B, C), without gradients.
        """
        with torch.no_grad():
            return self._class_tokens(self.teacher, images[None])

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Move the teacher towards the student.

        Args:
            momentum: how much of itself it keeps.
        """
        update_momentum(self.student, self.teacher, momentum)
        update_momentum(self.student_head, self.teacher_head, momentum)

    def _class_tokens(self, model: nn.Module, crops: Tensor) -> Tensor:
        images = normalise(crops.flatten(0, 1), self.expects.mean, self.expects.std)
        tokens = images.shape[-2] * images.shape[-1] // self.expects.patch_size**2
        with plain_attention(images.device, tokens):
            return model(images)


def make_head(dim: int, settings: DinoSettings) -> DINOProjectionHead:
    """DINO's head: three layers, a unit vector, a last layer of unit weights.

    Args:
        dim: of what it takes.
        settings: its widths.

    Returns:
        The head.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*weight_norm.*", FutureWarning)  # lightly's, for old checkpoints' sake
        return DINOProjectionHead(
            dim,
            settings.hidden_dim,
            settings.bottleneck_dim,
            settings.out_dim,
            norm_last_layer=settings.norm_last_layer,
        )
