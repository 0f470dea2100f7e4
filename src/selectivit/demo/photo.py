"""A photo as the page keeps it: read with care, bounded in size, known by its content."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from selectivit.data.images import ImageError, read_image
from selectivit.data.scene_rendering import scene
from selectivit.data.transforms import to_picture, to_tensor
from selectivit.features import preprocessing

KEPT_SIDE = 1024
"""Pixels of the longer side of a kept photo: no tab looks closer, and a session holds 3 MB at most."""


@dataclass(frozen=True)
class Limits:
    """What an upload may be.

    Args:
        megabytes: of the file.
        megapixels: of the picture, before it is decoded.
    """

    megabytes: float = 20.0
    megapixels: float = 50.0


@dataclass(frozen=True)
class Photo:
    """A photo that tabs can work on.

    Args:
        image: RGB, its longer side at most `KEPT_SIDE` pixels.
        name: for people.
        digest: of the content; equal photos have equal results.
        notes: what was done on reading it.
    """

    image: Image.Image
    name: str
    digest: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ready:
    """A photo as one model takes it.

    Args:
        pixels: (1, 3, H, W), normalised, on the model's device.
        shown: the same before normalising, (H, W, 3) in 0..1.
    """

    pixels: Tensor
    shown: Tensor


def open_photo(path: str | os.PathLike[str], limits: Limits | None = None) -> Photo:
    """Read a photo from a file.

    Args:
        path: of the file.
        limits: what it may be; None is the usual.

    Returns:
        The photo.

    Raises:
        ImageError: no picture, damaged, or beyond the limits; the text names the file without its folder.
    """
    limits, path = limits or Limits(), Path(path)
    size = path.stat().st_size if path.is_file() else 0
    if size > limits.megabytes * 1e6:
        raise ImageError(
            f"{path.name} has {size / 1e6:.1f} megabytes, more than the limit of {limits.megabytes:g}: scale it down"
        )
    try:
        read = read_image(path, shorter_side=KEPT_SIDE, max_pixels=round(limits.megapixels * 1e6))
    except ImageError as error:  # who looks at the page is told of a file, and not of the server's folders
        raise ImageError(str(error).replace(str(path), path.name)) from error
    return keep(read.image, path.name, read.notes)


def keep(image: Image.Image, name: str, notes: tuple[str, ...] = ()) -> Photo:
    """Make a photo of a picture.

    Args:
        image: RGB.
        name: for people.
        notes: what was done on reading it.

    Returns:
        The photo, scaled down where it is larger than the page needs.

    Example:
        >>> keep(Image.new("RGB", (2048, 512)), "wide").image.size
        (1024, 256)
    """
    scale = KEPT_SIDE / max(image.size)
    if scale < 1:
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.BICUBIC)
    content = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()
    return Photo(image, name, content, notes)


def rendered_scene(index: int) -> Photo:
    """Render a scene, for those who have no photo at hand.

    Args:
        index: which.

    Returns:
        The scene as a photo; the same number gives the same.

    Example:
        >>> rendered_scene(0).name
        'rendered scene 1'
    """
    return keep(Image.fromarray(scene(0, index, (336, 448)).image), f"rendered scene {index + 1}")


def ready(photo: Photo, model: nn.Module, size: int) -> Ready:
    """Make a photo what a model takes.

    Args:
        photo: the photo.
        model: with a known image tower.
        size: of the shorter side, pixels, rounded to whole patches.

    Returns:
        The photo, ready.
    """
    expected = preprocessing(model)
    fit = {"patch_size": expected.patch_size, "size": size, "max_patches": 4096}
    pixels = to_tensor(photo.image, mean=expected.mean, std=expected.std, **fit)[None]
    device = next(model.parameters()).device
    return Ready(pixels.to(device), torch.from_numpy(to_picture(photo.image, **fit)).float() / 255)
