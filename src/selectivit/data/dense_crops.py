"""Random crops of a photo together with its labels, a function of the seed and the sample's number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from selectivit.data.seeding import derived_seed, seeded

TRIES = 10


@dataclass(frozen=True)
class CropSettings:
    """How photos and labels are cut for training.

    Args:
        size: (height, width) of the crop, pixels.
        scales: the photo is scaled by a factor between these, drawn evenly; (1, 1) leaves it.
        shorter: pixels that the shorter side is scaled to before that; None leaves the photo as it is.
        most: a crop is drawn anew, up to ten times, while one label covers more than this share; 1 never.
        void: the label that counts for nothing, and fills where the photo is smaller than the crop.
    """

    size: tuple[int, int]
    scales: tuple[float, float] = (1.0, 1.0)
    shorter: int | None = None
    most: float = 1.0
    void: int = 255


def dense_crop(image: Image.Image, labels: Tensor, settings: CropSettings, seed: int) -> tuple[Tensor, Tensor]:
    """Scale, crop, flip and colour a photo; scale, crop and flip its labels alike.

    Args:
        image: RGB.
        labels: (H, W) of the photo's size; scaled to the nearest pixel.
        settings: how.
        seed: of everything that is drawn.

    Returns:
        The crop (3, height, width) in 0 … 1, and its labels (height, width).

    Example:
        >>> crop, labels = dense_crop(Image.new("RGB", (60, 40)), torch.zeros(40, 60), CropSettings((28, 42)), seed=0)
        >>> crop.shape, labels.shape
        (torch.Size([3, 28, 42]), torch.Size([28, 42]))

    Source: the crops and colours are those of MMSegmentation's standard training, which DINOv2's probes use.
    """
    with seeded(seed):
        image, labels = _scaled(image, labels, settings)
        height, width = settings.size
        missing = [0, 0, max(0, width - image.width), max(0, height - image.height)]  # right and below
        pixels = v2.functional.pad(v2.functional.pil_to_tensor(image), missing)
        labels = F.pad(labels, (0, missing[2], 0, missing[3]), value=settings.void)
        top, left, cut = 0, 0, labels
        for _ in range(TRIES):
            top = int(torch.randint(pixels.shape[1] - height + 1, ()))
            left = int(torch.randint(pixels.shape[2] - width + 1, ()))
            cut = labels[top : top + height, left : left + width]
            if settings.most >= 1 or _varied(cut, settings):
                break
        pixels = pixels[:, top : top + height, left : left + width]
        if torch.rand(()) < 0.5:
            pixels, cut = pixels.flip(2), cut.flip(1)
        return v2.functional.to_dtype(_colours()(pixels), torch.float32, scale=True), cut


def sample_seed(seed: int, number: int) -> int:
    """The seed of one sample of a run."""
    return derived_seed(seed, "dense crop", number)


def _scaled(image: Image.Image, labels: Tensor, settings: CropSettings) -> tuple[Image.Image, Tensor]:
    low, high = settings.scales
    factor = low + (high - low) * float(torch.rand(()))
    if settings.shorter is not None:
        factor *= settings.shorter / min(image.size)
    width, height = (max(1, round(side * factor)) for side in image.size)
    if (width, height) == image.size:
        return image, labels
    scaled = F.interpolate(labels[None, None].float(), (height, width), mode="nearest-exact")[0, 0]
    return image.resize((width, height), Image.Resampling.BILINEAR), scaled.to(labels.dtype)


def _varied(labels: Tensor, settings: CropSettings) -> bool:
    _, counts = labels[labels != settings.void].unique(return_counts=True)
    return len(counts) > 1 and bool(counts.max() / counts.sum() < settings.most)


@lru_cache(maxsize=1)
def _colours() -> Callable[[Tensor], Tensor]:
    """Brightness, contrast, saturation and hue, each half of the time (SSD's distortion, as mmseg has it)."""
    jitters = [{"brightness": 32 / 255}, {"contrast": 0.5}, {"saturation": 0.5}, {"hue": 0.05}]
    return v2.Compose([v2.RandomApply([v2.ColorJitter(**jitter)], p=0.5) for jitter in jitters])
