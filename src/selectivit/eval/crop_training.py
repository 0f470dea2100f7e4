"""Random crops through a frozen model to a head that is trained: the published protocols, where nothing is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from selectivit.data.dense_crops import CropSettings, dense_crop, sample_seed
from selectivit.data.images import ImageError
from selectivit.data.seeding import derived_seed
from selectivit.data.views import check_whole_patches
from selectivit.eval.token_table import TOKENS
from selectivit.features import Features, block_features, preprocessing


@dataclass(frozen=True)
class FrozenTokens:
    """A frozen model as the front of a head.

    Args:
        model: in eval mode on its device, swapped or not.
        layers: blocks whose tokens are put side by side.
        tokens: "cls", "patch" or "cls+patch".
        norm: pass them through the final norm.
        num_cores: budget of a VECA model.
    """

    model: nn.Module
    layers: tuple[int, ...]
    tokens: str
    norm: bool = True
    num_cores: int | None = None

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """From normalised images (B, 3, H, W) to maps (B, D, h, w), float32, on the model's device.

        Raises:
            ValueError: tokens that the model does not have.
        """
        device = next(self.model.parameters()).device
        found = block_features(self.model, images.to(device), self.layers, norm=self.norm, num_cores=self.num_cores)
        return torch.cat([part for one in found for part in _parts(one, self.tokens)], 1).float()


def _parts(found: Features, tokens: str) -> Iterator[Tensor]:
    if tokens not in TOKENS:
        raise ValueError(f"expected --tokens {', '.join(TOKENS)}, got {tokens!r}")
    if tokens != "patch":
        if found.cls is None:
            raise ValueError(f"the model has no class token: expected --tokens patch, got {tokens}")
        yield found.cls[:, :, None, None].expand(-1, -1, *found.grid)
    if tokens != "cls":
        yield found.map


@dataclass
class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Random crops with their labels, every photo once an epoch.

    Args:
        count: of photos.
        read: place -> photo (PIL, RGB) and labels (H, W) of its size.
        name: place -> what to call it.
        settings: of the crops.
        model: for the mean, std and patch that it expects.
        seed: of order, crops and colours.

    Raises:
        ValueError: a crop that is not of whole patches.
    """

    count: int
    read: Callable[[int], tuple[Any, Tensor]]
    name: Callable[[int], str]
    settings: CropSettings
    model: nn.Module
    seed: int
    problems: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expected = preprocessing(self.model)
        for side in self.settings.size:
            check_whole_patches(side, expected.patch_size)
        self.mean, self.std = (torch.tensor(each).view(3, 1, 1) for each in (expected.mean, expected.std))

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """One crop, normalised (3, h, w), and its labels; in place of what cannot be read, the next of the epoch.

        Raises:
            ImageError: nothing can be read.
        """
        epoch, place = divmod(number, self.count)
        order = np.random.default_rng(derived_seed(self.seed, "order", epoch)).permutation(self.count)
        reason = ""
        for step in range(self.count):
            index = int(order[(place + step) % self.count])
            try:
                image, labels = self.read(index)
            except (ImageError, OSError) as error:
                reason = self.problems[self.name(index)] = str(error)
                continue
            pixels, labels = dense_crop(image, labels, self.settings, sample_seed(self.seed, number))
            return (pixels - self.mean) / self.std, labels
        raise ImageError(f"none of the {self.count} photos can be used; the last: {reason}")


class CropBatches:
    """The batch of any step, read ahead as long as steps follow each other.

    Args:
        crops: where they come from.
        batch_size: crops a step.
        steps: of the whole training.
        workers: processes that read; 0 reads in this one.
    """

    def __init__(self, crops: Crops, batch_size: int, steps: int, workers: int):
        self.crops, self.batch_size, self.steps, self.workers = crops, batch_size, steps, workers
        self._next, self._batches = -1, iter(())

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Crops (B, 3, h, w) and labels (B, h, w) of a step."""
        if step != self._next:
            numbers = range(step * self.batch_size, self.steps * self.batch_size)
            loader = DataLoader(self.crops, self.batch_size, sampler=numbers, num_workers=self.workers)  # pyright: ignore[reportArgumentType]
            self._batches = iter(loader)
        self._next = step + 1
        return next(self._batches)


def windows(size: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> list[tuple[int, int]]:
    """Upper left corners of windows that cover a picture, those at the far edges moved inside.

    Args:
        size: (height, width) of the picture, at least the window's.
        window: (height, width).
        stride: (down, across).

    Returns:
        (top, left) of each, row by row.

    Example:
        >>> windows((4, 7), (4, 4), (2, 2))
        [(0, 0), (0, 2), (0, 3)]

    Source: the sliding inference of MMSegmentation.
    """

    def starts(whole: int, part: int, step: int) -> list[int]:
        return sorted({min(i * step, whole - part) for i in range(max(0, -(-(whole - part) // step)) + 1)})

    rows, columns = (starts(*each) for each in zip(size, window, stride, strict=True))
    return [(top, left) for top in rows for left in columns]


def slide(
    image: Tensor, logits: Callable[[Tensor], Tensor], window: tuple[int, int], stride: tuple[int, int], batch_size: int
) -> Tensor:
    """Logits of a picture, the mean over the windows that see a pixel.

    Args:
        image: (3, H, W), at least as large as the window.
        logits: from windows (B, 3, h, w) to (B, K, h, w) of the same size.
        window: (height, width).
        stride: (down, across).
        batch_size: windows computed at once.

    Returns:
        (K, H, W).

    Example:
        >>> slide(torch.ones(3, 4, 7), lambda x: x, (4, 4), (2, 2), 2).shape
        torch.Size([3, 4, 7])
    """
    height, width = window
    places: Sequence[tuple[int, int]] = windows((image.shape[1], image.shape[2]), window, stride)
    total: Tensor | None = None
    counts = torch.zeros(image.shape[1:])
    for start in range(0, len(places), batch_size):
        some = places[start : start + batch_size]
        found = logits(torch.stack([image[:, t : t + height, s : s + width] for t, s in some]))
        if total is None:
            total = found.new_zeros(found.shape[1], *image.shape[1:])
        for (top, left), one in zip(some, found, strict=True):
            total[:, top : top + height, left : left + width] += one
            counts[top : top + height, left : left + width] += 1
    assert total is not None
    return total / counts.to(total.device)
