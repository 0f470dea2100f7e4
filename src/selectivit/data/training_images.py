"""Crops for training: photo and augmentation are a function of the run's seed and the sample's number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from selectivit.data.images import ImageError
from selectivit.data.photos import PhotoSource
from selectivit.data.seeding import derived_seed, seeded

LONGEST = 4
SHORT_SIDE = 1.125
"""The photo's shorter side over the crop's: 288 px for a crop of 256."""


@dataclass(frozen=True)
class Sample:
    """Which crop is wanted.

    Args:
        number: counted through the whole run and over all processes.
        size: side of the crop in pixels.
    """

    number: int
    size: int


@dataclass(frozen=True)
class Batch:
    """Crops of one size.

    Args:
        images: (B, 3, size, size) uint8.
        first: the number of the first sample.
        skipped: what could not be read on the way, and why.
        slots: of each crop, a number that it has each time it comes again; empty where crops are drawn anew.
    """

    images: Tensor
    first: int
    skipped: tuple[tuple[str, str], ...]
    slots: tuple[int, ...] = ()

    def pin_memory(self) -> Batch:
        """The same in memory that a card can fetch from."""
        return replace(self, images=self.images.pin_memory())


@dataclass(frozen=True)
class Crop:
    """One sample.

    Args:
        number: counted through the whole run and over all processes.
        image: (3, size, size) uint8.
        skipped: what could not be read on the way, and why.
        slot: a number that the crop has each time it comes again; None where it is drawn anew.
    """

    number: int
    image: Tensor
    skipped: tuple[tuple[str, str], ...] = ()
    slot: int | None = None


class TrainingImages(Dataset[Crop]):
    """Random crops of photos, every photo once an epoch, in an order of its own each epoch.

    Args:
        photos: where they come from.
        seed: the run's.
        augment: flip, and TrivialAugmentWide's colours, turns and shears.
        views: crops of each photo, that come again in turns; None draws a new one each time.

    Raises:
        ValueError: no photos.
    """

    def __init__(self, photos: PhotoSource, seed: int, augment: bool = True, views: int | None = None):
        if not len(photos):
            raise ValueError("no photo to train on: expected at least one")
        self.photos, self.seed, self.augment, self.views = photos, seed, augment, views
        self._unreadable: dict[int, str] = {}  # of this process: decoded in vain once, not again

    def __getitem__(self, sample: Sample) -> Crop:
        """One crop.

        Args:
            sample: which.

        Returns:
            The crop. In the place of a photo that cannot be read stands the next one of the epoch.

        Raises:
            ImageError: no photo at all can be read.
        """
        image, index, skipped = self.photo(sample.number, round(sample.size * SHORT_SIDE))
        epoch = sample.number // len(self.photos)
        slot = None if self.views is None else index * self.views + epoch % self.views
        draw = ("augmentation", sample.number) if slot is None else ("view", slot)
        with seeded(derived_seed(self.seed, *draw)):
            crop = crop_transform(sample.size, self.augment)(image)
        return Crop(sample.number, crop, skipped, slot)

    def photo(self, number: int, shorter_side: int) -> tuple[Image.Image, int, tuple[tuple[str, str], ...]]:
        """The photo of a sample.

        Args:
            number: the sample's.
            shorter_side: a hint, as for `read_image`.

        Returns:
            8-bit RGB, its place among the photos, and what could not be read on the way.

        Raises:
            ImageError: no photo at all can be read.
        """
        count = len(self.photos)
        epoch, place = divmod(number, count)
        order = epoch_order(count, self.seed, epoch)
        skipped: list[tuple[str, str]] = []
        for step in range(count):
            index = int(order[(place + step) % count])
            if index not in self._unreadable:
                try:
                    return self.photos.read(index, shorter_side), index, tuple(skipped)
                except ImageError as error:
                    self._unreadable[index] = str(error)
            skipped.append((self.photos.name(index), self._unreadable[index]))
        raise ImageError(f"none of the {count} photos can be read; the last: {skipped[-1][1]}")


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the photos in one epoch.

    Args:
        count: of photos.
        seed: the run's.
        epoch: counted from 0.

    Returns:
        A permutation of 0 … count − 1.

    Example:
        >>> sorted(epoch_order(3, 0, 1).tolist())
        [0, 1, 2]
    """
    return np.random.default_rng(derived_seed(seed, "order", epoch)).permutation(count)


@lru_cache(maxsize=16)
def crop_transform(size: int, augment: bool) -> v2.Compose:
    """Resize, crop, and if wanted flip and TrivialAugmentWide; draws from torch's generator.

    Args:
        size: side of the crop, pixels.
        augment: as for `TrainingImages`.

    Returns:
        From an RGB picture to (3, size, size) uint8.

    Example:
        >>> crop_transform(28, True)(Image.new("RGB", (60, 40))).shape
        torch.Size([3, 28, 28])

    Source: TrivialAugment, arXiv 2103.10158.
    """
    bicubic = v2.InterpolationMode.BICUBIC
    extra: list[torch.nn.Module] = [v2.RandomHorizontalFlip(), v2.TrivialAugmentWide()] if augment else []
    shorter = round(size * SHORT_SIDE)
    resize = v2.Resize(shorter, interpolation=bicubic)
    return v2.Compose([v2.Lambda(less_elongated), resize, v2.RandomCrop(size), *extra, v2.PILToTensor()])


def less_elongated(image: Image.Image) -> Image.Image:
    """Cut a random part out of a picture that is far longer than wide: resized whole it would not fit into memory.

    Args:
        image: any.

    Returns:
        At most `LONGEST` times as long as wide.

    Example:
        >>> less_elongated(Image.new("RGB", (3, 900))).size
        (3, 12)
    """
    shorter, longer = sorted(image.size)
    kept = max(shorter, round(shorter * LONGEST))
    if longer <= kept:
        return image
    start = int(torch.randint(longer - kept + 1, ()))
    wide = image.width == longer
    return image.crop((start, 0, start + kept, image.height) if wide else (0, start, image.width, start + kept))


def collate(samples: Sequence[Crop]) -> Batch:
    """Put crops into a batch.

    Args:
        samples: as `TrainingImages` gives them, of one size.

    Returns:
        The batch.
    """
    images = torch.stack([sample.image for sample in samples])
    skipped = dict(pair for sample in samples for pair in sample.skipped)
    slots = tuple(sample.slot for sample in samples if sample.slot is not None)
    return Batch(images, samples[0].number, tuple(skipped.items()), slots)


def centre_crops(
    photos: PhotoSource, indices: Sequence[int], size: int, at_most: int | None = None
) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """The middles of photos.

    Args:
        photos: where they come from.
        indices: which.
        size: side of the crop, pixels.
        at_most: photos to look for; None takes all.

    Returns:
        Each (3, size, size) uint8; and names and reasons of those that cannot be read.
    """
    crops, skipped = [], []
    for index in indices:
        if len(crops) == at_most:
            break
        try:
            image = photos.read(index, round(size * SHORT_SIDE))
        except ImageError as error:
            skipped.append((photos.name(index), str(error)))
        else:
            crops.append(_centre(image, size))
    return crops, skipped


def _centre(image: Image.Image, size: int) -> Tensor:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return v2.functional.pil_to_tensor(square.resize((size, size), Image.Resampling.BICUBIC, reducing_gap=3.0))
