"""A photo's file as the batch of one that a model takes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from selectivit.swap.sites import Preprocessing


def load_image(path: str | os.PathLike[str], expected: Preprocessing, *, size: int | None = None) -> Tensor:
    """Read a photo as a model takes it: turned by its EXIF data, scaled to whole patches, normalised.

    Args:
        path: JPEG, PNG, WebP, TIFF and what else Pillow reads.
        expected: `preprocessing(model)`.
        size: the shorter side in pixels, rounded to whole patches; None is the size the model was made for. The aspect
            is kept up to rounding.

    Returns:
        (1, 3, H, W) float32, H and W multiples of the patch.

    Raises:
        ImageError: a ValueError; no such file, not a picture, damaged, or too large.
        ImportError: Pillow is missing.
        ValueError: a size that is not positive.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> from selectivit.swap.sites import Preprocessing
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "photo.jpg"
        >>> Image.new("RGB", (640, 480)).save(path)
        >>> expected = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, patch_size=14, image_size=(224, 224))
        >>> load_image(path, expected).shape
        torch.Size([1, 3, 224, 294])
    """
    try:
        from selectivit.data.images import read_image
        from selectivit.data.transforms import to_tensor
    except ModuleNotFoundError as error:
        raise ImportError(f"reading photos needs Pillow ({error}): pip install 'selectivit[cli]'") from error

    side = min(expected.image_size) if size is None else size
    picture = read_image(path, shorter_side=side).image
    return to_tensor(picture, mean=expected.mean, std=expected.std, patch_size=expected.patch_size, size=side)[None]
