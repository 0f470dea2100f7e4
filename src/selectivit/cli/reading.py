"""A photo from its file to the tensor that a model takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class ReadyPhoto:
    """A photo that is ready for a model.

    Args:
        image: (3, H, W), normalised.
        shown: the same before normalising, (H, W, 3) in 0..1.
        notes: what was done to the photo on reading it.
    """

    image: Tensor
    shown: Tensor
    notes: tuple[str, ...]


def ready_photo(path: Path, model: nn.Module, size: int | None) -> ReadyPhoto:
    """Read a photo and make it what a model takes.

    Args:
        path: the file.
        model: the model.
        size: length in pixels of the shorter side; None is the size the model was made for.

    Returns:
        The photo.

    Raises:
        ImageError: the file is no image that can be read.
        OSError: the file cannot be opened.
        ValueError: a size that is not positive.
    """
    import torch

    from selectivit.data.images import read_image
    from selectivit.data.transforms import target_size, to_picture, to_tensor
    from selectivit.features import preprocessing

    expected = preprocessing(model)
    side = min(expected.image_size) if size is None else size
    fit = {"patch_size": expected.patch_size, "size": side}
    read = read_image(path, shorter_side=side)
    image = to_tensor(read.image, mean=expected.mean, std=expected.std, **fit)
    shown = torch.from_numpy(to_picture(read.image, **fit)).float() / 255
    return ReadyPhoto(image, shown, (*read.notes, *target_size(read.image.size, **fit).notes))
