"""From a picture to what a model takes: whole patches, the aspect kept, values normalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MAX_PATCHES = 16384
"""A picture is scaled down to at most this many patches: 1792 x 1792 px at a patch of 14 px."""


@dataclass(frozen=True)
class TargetSize:
    """The size a picture gets before the model sees it.

    Args:
        height: pixels, a multiple of the patch.
        width: pixels, a multiple of the patch.
        notes: in words, when it is smaller than what was asked for; else empty.
    """

    height: int
    width: int
    notes: tuple[str, ...] = ()


def target_size(
    image_size: tuple[int, int], *, patch_size: int, size: int | None = None, max_patches: int = MAX_PATCHES
) -> TargetSize:
    """Choose the size in whole patches that is nearest to the one asked for.

    Args:
        image_size: (width, height) in pixels, as PIL's `image.size`.
        patch_size: side of a patch, pixels.
        size: the shorter side to scale to, pixels; None keeps the picture's own.
        max_patches: upper bound on the number of patches.

    Returns:
        Each side rounded to the nearest multiple of the patch, at least one patch, and at most `max_patches` in all.

    Raises:
        ValueError: a size, patch or bound that is not positive.

    Example:
        >>> target_size((640, 480), patch_size=14, size=224)
        TargetSize(height=224, width=294, notes=())
    """
    width, height = image_size
    given = {"width": width, "height": height, "patch_size": patch_size, "max_patches": max_patches}
    for name, value in {**given, "size": 1 if size is None else size}.items():
        if value < 1:
            raise ValueError(f"expected {name} of at least 1, got {value}")
    scale = 1.0 if size is None else size / min(width, height)
    rows, columns = (max(1, round(side * scale / patch_size)) for side in (height, width))
    if rows * columns <= max_patches:
        return TargetSize(rows * patch_size, columns * patch_size)
    # Both sides by the same factor; one that would vanish stays at one patch, and the bound cuts the other.
    factor = math.sqrt(max_patches / (rows * columns))
    fewer_rows, fewer_columns = (min(max_patches, max(1, math.floor(n * factor))) for n in (rows, columns))
    fitted_height, fitted_width = fewer_rows * patch_size, fewer_columns * patch_size
    note = (
        f"{columns * patch_size} x {rows * patch_size} px would be {rows * columns} patches, more than {max_patches}: "
        f"scaled down to {fitted_width} x {fitted_height} px"
    )
    return TargetSize(fitted_height, fitted_width, (note,))


def to_picture(
    image: Image.Image, *, patch_size: int, size: int | None = None, max_patches: int = MAX_PATCHES
) -> np.ndarray:
    """The picture as the model sees it, for showing: scaled, not normalised.

    Args:
        image: RGB.
        patch_size: see `target_size`.
        size: see `target_size`.
        max_patches: see `target_size`.

    Returns:
        (H, W, 3) uint8, the size that `to_tensor` gives with the same arguments.

    Raises:
        ValueError: a picture that is not RGB, or what `target_size` refuses.

    Example:
        >>> to_picture(Image.new("RGB", (30, 20)), patch_size=14).shape
        (14, 28, 3)
    """
    if image.mode != "RGB":
        raise ValueError(f"expected an RGB picture, got mode {image.mode!r}: read_image makes one")
    target = target_size(image.size, patch_size=patch_size, size=size, max_patches=max_patches)
    if image.size != (target.width, target.height):
        # PIL's bicubic antialiases; large pictures are first reduced by whole factors, to three times the target.
        image = image.resize((target.width, target.height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return np.array(image)


def to_tensor(
    image: Image.Image,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    patch_size: int,
    size: int | None = None,
    max_patches: int = MAX_PATCHES,
) -> Tensor:
    """Scale a picture to whole patches and normalise it. The same picture always gives the same tensor.

    Args:
        image: RGB.
        mean: per channel, subtracted from values in [0, 1].
        std: per channel, divides what is left.
        patch_size: side of a patch, pixels.
        size: the shorter side to scale to, pixels; None keeps the picture's own. The aspect is kept up to rounding.
        max_patches: pictures of more patches are scaled down; `target_size` tells when.

    Returns:
        (3, H, W) float32, H and W multiples of the patch.

    Raises:
        ValueError: a picture that is not RGB; mean or std that are not three numbers, std positive; a bad size.

    Example:
        >>> image = Image.new("RGB", (640, 480), (255, 255, 255))
        >>> tensor = to_tensor(image, mean=(0.5,) * 3, std=(0.5,) * 3, patch_size=14, size=224)
        >>> tensor.shape, tensor.max().item()
        (torch.Size([3, 224, 294]), 1.0)
    """
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"expected three means and three positive stds, got mean={mean!r}, std={std!r}")
    picture = to_picture(image, patch_size=patch_size, size=size, max_patches=max_patches)
    pixels = torch.from_numpy(picture).permute(2, 0, 1).float().div_(255)  # (3, H, W)
    return pixels.sub_(torch.tensor(mean).view(3, 1, 1)).div_(torch.tensor(std).view(3, 1, 1)).contiguous()
