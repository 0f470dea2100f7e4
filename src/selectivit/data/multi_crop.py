"""DINO's crops of a photo, two large ones and some small ones: a function of the seed and the sample's number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from selectivit.data.photos import PhotoSource
from selectivit.data.seeding import derived_seed, seeded
from selectivit.data.training_images import Sample, TrainingImages


@dataclass(frozen=True)
class Crops:
    """What is cut out of a photo; the defaults are DINO's.

    Args:
        global_size: side of the two large crops, pixels.
        global_scale: least and largest share of the photo's area in a large crop.
        local_size: side of a small crop, pixels.
        local_scale: likewise.
        num_local: small crops a photo; 0 or more.

    Raises:
        ValueError: numbers outside these.

    Example:
        >>> Crops().shorter_side
        429

    Source: DINO, arXiv 2104.14294.
    """

    global_size: int = 224
    global_scale: tuple[float, float] = (0.4, 1.0)
    local_size: int = 96
    local_scale: tuple[float, float] = (0.05, 0.4)
    num_local: int = 8

    def __post_init__(self) -> None:
        if min(self.global_size, self.local_size) < 1 or self.num_local < 0:
            raise ValueError(
                f"expected crops of 1 px or more, and 0 or more small ones, got {self.global_size} px, "
                f"{self.local_size} px and {self.num_local}"
            )
        for low, high in (self.global_scale, self.local_scale):
            if not 0 < low <= high <= 1:
                raise ValueError(f"expected shares of a photo's area in (0, 1], the least first, got {low} and {high}")

    @property
    def shorter_side(self) -> int:
        """Pixels of a photo's shorter side from which on no crop of a square photo is enlarged."""
        wanted = ((self.global_size, self.global_scale), (self.local_size, self.local_scale))
        return max(math.floor(size / math.sqrt(scale[0])) for size, scale in wanted)


@dataclass(frozen=True)
class MultiCropBatch:
    """The crops of some photos.

    Args:
        large: (2, B, 3, G, G) uint8.
        small: (S, B, 3, L, L) uint8.
        first: the number of the first sample.
        skipped: what could not be read on the way, and why.
    """

    large: Tensor
    small: Tensor
    first: int
    skipped: tuple[tuple[str, str], ...]

    def pin_memory(self) -> MultiCropBatch:
        """The same in memory that a card can fetch from."""
        return MultiCropBatch(self.large.pin_memory(), self.small.pin_memory(), self.first, self.skipped)


class MultiCropImages(Dataset[tuple[int, list[Tensor], tuple[tuple[str, str], ...]]]):
    """DINO's crops of photos, every photo once an epoch, in an order of its own each epoch.

    Args:
        photos: where they come from.
        seed: the run's.
        crops: what is cut out.

    Raises:
        ValueError: no photos.
    """

    def __init__(self, photos: PhotoSource, seed: int, crops: Crops):
        self.images, self.seed, self.crops = TrainingImages(photos, seed), seed, crops

    def __getitem__(self, sample: Sample) -> tuple[int, list[Tensor], tuple[tuple[str, str], ...]]:
        """The crops of one photo.

        Args:
            sample: which.

        Returns:
            Its number, the crops (3, G, G) or (3, L, L) uint8, the two large ones first, and what could not be read.

        Raises:
            ImageError: no photo at all can be read.
        """
        image, _, skipped = self.images.photo(sample.number, self.crops.shorter_side)
        seed = derived_seed(self.seed, "augmentation", sample.number)
        with seeded(seed), numpy_seeded(seed):
            views = dino_transform(self.crops)(image)
        return sample.number, [view.mul(255).round_().to(torch.uint8) for view in views], skipped


@lru_cache(maxsize=4)
def dino_transform(crops: Crops) -> Any:
    """DINO's augmentation by lightly, without its normalisation; draws from torch's and numpy's generators.

    Args:
        crops: what is cut out.

    Returns:
        From an RGB picture to a list of float32 tensors in [0, 1].
    """
    from lightly.transforms.dino_transform import DINOTransform

    return DINOTransform(
        global_crop_size=crops.global_size,
        global_crop_scale=crops.global_scale,
        local_crop_size=crops.local_size,
        local_crop_scale=crops.local_scale,
        n_local_views=crops.num_local,
        normalize=None,
    )


@contextmanager
def numpy_seeded(seed: int) -> Iterator[None]:
    """Draw numpy's global random numbers from a seed for a while; the generator is then as it was.

    Args:
        seed: 0 to 2³² − 1.

    Returns:
        A context manager.

    Example:
        >>> with numpy_seeded(3):
        ...     a = np.random.random_sample()
        >>> with numpy_seeded(3):
        ...     bool(np.random.random_sample() == a)
        True
    """
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


def collate_crops(samples: Sequence[tuple[int, list[Tensor], tuple[tuple[str, str], ...]]]) -> MultiCropBatch:
    """Put the crops of several photos into a batch, crop by crop.

    Args:
        samples: as `MultiCropImages` gives them.

    Returns:
        The batch.
    """
    views = [torch.stack(list(same)) for same in zip(*(crops for _, crops, _ in samples), strict=True)]
    small = torch.stack(views[2:]) if views[2:] else views[0].new_empty(0, len(samples), 3, 0, 0)
    skipped = dict(pair for _, _, pairs in samples for pair in pairs)
    return MultiCropBatch(torch.stack(views[:2]), small, samples[0][0], tuple(skipped.items()))
