"""A picture in whatever form it comes: a file, a PIL image or a tensor."""

from __future__ import annotations

import os
from typing import Any

import torch
from PIL import Image

from selectivit.data.images import LoadedImage, read_image


def as_picture(image: Any) -> LoadedImage:
    """Take a picture as 8-bit RGB from a path, a PIL image or a tensor.

    Args:
        image: a path; a PIL image of any mode; or a tensor (3, H, W) uint8, not normalised.

    Returns:
        The picture and notes.

    Raises:
        ImageError: a file that is no picture.
        TypeError: anything else.
        ValueError: a tensor of another shape or dtype.

    Example:
        >>> as_picture(torch.zeros(3, 4, 6, dtype=torch.uint8)).image.size
        (6, 4)
    """
    if isinstance(image, (str, os.PathLike)):
        return read_image(image)
    if isinstance(image, Image.Image):
        return LoadedImage(image if image.mode == "RGB" else image.convert("RGB"))
    if not isinstance(image, torch.Tensor):
        raise TypeError(f"expected a path, a PIL image or a uint8 tensor (3, H, W), got {type(image).__name__}")
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ValueError(
            f"expected one picture as a uint8 tensor (3, H, W), not yet normalised, got {tuple(image.shape)} of "
            f"{image.dtype}"
        )
    return LoadedImage(Image.fromarray(image.permute(1, 2, 0).contiguous().cpu().numpy()))
