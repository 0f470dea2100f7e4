"""Pictures from files: whatever comes in, an 8-bit RGB picture goes out, or an error that says why not."""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps

from selectivit.data.find import FoundImage, find_images

__all__ = ["MAX_PIXELS", "FoundImage", "ImageError", "LoadedImage", "decode_image", "find_images", "read_image"]

MAX_PIXELS = 178_956_970
"""More pixels than this are refused: PIL's own limit, 0.5 GB of RGB. 10000 x 10000 is well below."""

# No EPS or PDF: those formats are programs, and PIL would start another program to run them. No TGA: it has no mark of
# its own, so that any file might pass for one.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "MPO", "PPM", "JPEG2000", "AVIF")


class ImageError(ValueError):
    """A file that cannot be used as a picture; the text names it, says what is wrong and what to do."""


@dataclass(frozen=True)
class LoadedImage:
    """A picture read from a file.

    Args:
        image: 8-bit RGB, the right way up.
        notes: what was changed or left out on the way, in words; empty for an ordinary picture.
    """

    image: Image.Image
    notes: tuple[str, ...] = ()


def read_image(
    path: str | os.PathLike[str], *, shorter_side: int | None = None, max_pixels: int = MAX_PIXELS
) -> LoadedImage:
    """Read a picture as 8-bit RGB.

    The EXIF rotation is applied. Of several frames or pages the first is taken; transparency is laid on white; 16-bit
    and floating-point grey is scaled to 8 bits; CMYK is converted. All but the rotation are noted.

    Args:
        path: JPEG, PNG, WebP, GIF, TIFF, BMP, PPM, JPEG 2000 or AVIF.
        shorter_side: pixels; a hint that the picture will be scaled down to about this. Large JPEGs are then decoded at
            1/2, 1/4 or 1/8 of their size, with both sides still at least twice this: less time and memory.
        max_pixels: a picture of more is refused before it is decoded; at most `MAX_PIXELS`.

    Returns:
        The picture and notes.

    Raises:
        ImageError: no such file, a folder, an empty file, not a picture, damaged or cut short, or too many pixels.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "grey.png"
        >>> Image.new("L", (4, 3), 128).save(path)
        >>> read_image(path).image.getpixel((0, 0))
        (128, 128, 128)
    """
    path = Path(path)
    _check_file(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ImageError(f"{path} cannot be read ({error.strerror}): allow reading it") from error
    with file:
        return _read(file, str(path), shorter_side, max_pixels)


def decode_image(content: bytes, name: str, *, shorter_side: int | None = None) -> LoadedImage:
    """Read a picture that lies in memory, as `read_image` reads one from a file.

    Args:
        content: the bytes of a picture's file.
        name: for errors.
        shorter_side: as for `read_image`.

    Returns:
        The picture and notes.

    Raises:
        ImageError: no bytes, not a picture, damaged or cut short, or too many pixels.

    Example:
        >>> buffer = io.BytesIO()
        >>> Image.new("L", (4, 3), 128).save(buffer, format="PNG")
        >>> decode_image(buffer.getvalue(), "grey").image.size
        (4, 3)
    """
    if not content:
        raise ImageError(f"{name} is empty (0 bytes): get a whole copy of it")
    return _read(io.BytesIO(content), name, shorter_side)


def _read(file: IO[bytes], name: str, shorter_side: int | None, max_pixels: int = MAX_PIXELS) -> LoadedImage:
    notes: list[str] = []
    # PIL tells small faults by warnings: they become notes, and never errors where warnings are errors.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            image = _decode(file, name, shorter_side, min(max_pixels, MAX_PIXELS), notes)
        except ImageError:
            raise
        except Image.DecompressionBombError:
            limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
            raise ImageError(f"{name} has more than {limit} pixels, the limit of PIL: scale it down first") from None
        except MemoryError:
            raise ImageError(f"{name} does not fit into memory: scale it down first") from None
        except Image.UnidentifiedImageError:
            raise ImageError(
                f"{name} is not a picture that can be read: expected JPEG, PNG, WebP, GIF or TIFF"
            ) from None
        except Exception as error:  # decoders raise all kinds of errors on damaged files
            reason = str(error) or type(error).__name__
            raise ImageError(f"{name} is damaged or cut short ({reason}): get a whole copy of the file") from error
    told = (str(each.message) for each in caught if not issubclass(each.category, Image.DecompressionBombWarning))
    return LoadedImage(image, (*notes, *dict.fromkeys(told)))


def _check_file(path: Path) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ImageError(f"{path} does not exist: check the spelling") from None
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise ImageError(f"{path} cannot be read ({error})") from None
    if path.is_dir():
        raise ImageError(f"{path} is a folder, expected a picture: use find_images for the pictures in it")
    if not path.is_file():
        raise ImageError(f"{path} is no ordinary file, expected a picture")
    if size == 0:
        raise ImageError(f"{path} is empty (0 bytes): get a whole copy of the file")


def _decode(file: IO[bytes], name: str, shorter_side: int | None, max_pixels: int, notes: list[str]) -> Image.Image:
    Image.init()
    image = Image.open(file, formats=[known for known in _FORMATS if known in Image.OPEN])
    if image.width * image.height > max_pixels:
        bomb = ", and might be a decompression bomb" if max_pixels == MAX_PIXELS else ""
        raise ImageError(
            f"{name} has {image.width} x {image.height} pixels, more than the limit of {max_pixels}{bomb}: scale it "
            "down first"
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        image.seek(0)
        notes.append(f"{frames} frames or pages: the first is used")
    if shorter_side:
        image.draft(None, (2 * shorter_side, 2 * shorter_side))
    image.load()  # all of it, so that the file may be closed
    _turn(image, notes)
    return _to_rgb(image, notes)


def _turn(image: Image.Image, notes: list[str]) -> None:
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception as error:  # a picture is not worse for a broken EXIF block, whatever that raises
        notes.append(f"EXIF data cannot be read, a rotation in it is not applied ({error})")


def _to_rgb(image: Image.Image, notes: list[str]) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _deep_grey(image, notes)
    if image.mode in ("CMYK", "LAB", "HSV", "YCbCr"):
        notes.append(f"{image.mode} is converted to RGB without a colour profile")
    elif image.has_transparency_data:
        return _on_white(image.convert("RGBA"), notes)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image, notes: list[str]) -> Image.Image:
    lowest, _ = image.getchannel("A").getextrema()
    if lowest == 255:
        return image.convert("RGB")
    notes.append("transparent parts are laid on white")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _deep_grey(image: Image.Image, notes: list[str]) -> Image.Image:
    """Grey of more than 8 bits: 0…65535 keeps its meaning, other ranges are stretched."""
    if "transparency" in image.info:
        notes.append("the grey value that stands for transparent is shown as it is")
    values = np.asarray(image).astype(np.float32)
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        notes.append("values that are not finite are shown as 0")
    low, high = float(values.min()), float(values.max())
    if image.mode == "I" and image.format != "PNG" and low >= 0 and 1 < high <= 255:  # PNG has 16 bits, not 32
        notes.append("32-bit grey up to 255 is taken for 8-bit grey")
    elif image.mode != "F" and low >= 0 and high <= 65535:
        values /= 257.0
        notes.append("16-bit grey is scaled to 8 bits")
    elif image.mode == "F" and low >= 0 and high <= 1:
        values *= 255.0
        notes.append("floating-point grey, 0 to 1, is scaled to 8 bits")
    else:
        values = (values - low) * (255.0 / max(high - low, 1e-30))
        notes.append(f"grey from {low:g} to {high:g} is stretched to 8 bits")
    return Image.fromarray(np.round(values).astype(np.uint8)).convert("RGB")
