"""Masks of classes from files: ids as they stand in the file, and class indices with void made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from selectivit.data.images import ImageError

VOID = 255
"""The index of pixels that count for nothing."""
MAX_CLASSES = 254
_UNKNOWN = 254  # an id that is on no list


class MaskError(ImageError):
    """A file that cannot be used as a mask of classes; the text says what was expected and what to do."""


def voc_colours() -> np.ndarray:
    """The 256 colours of PASCAL VOC's masks, (256, 3) uint8: the bits of the id, three at a time, from the top down.

    Example:
        >>> voc_colours()[[1, 15, 255]].tolist()
        [[128, 0, 0], [192, 128, 128], [224, 224, 192]]
    """
    ids, colours = np.arange(256), np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (((ids >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colours


def read_ids(path: Path, colours: np.ndarray | None = None) -> np.ndarray:
    """Read a mask as the ids that it holds.

    Args:
        path: PNG, TIFF, BMP or GIF of one channel, or with a palette, whose indices are the ids.
        colours: (256, 3) uint8, the colour of each id: masks in these colours are read too.

    Returns:
        (H, W), integers.

    Raises:
        MaskError: no such file, damaged, a lossy format, or in colours that are not known.
    """
    try:
        with Image.open(path) as image:
            if image.format in ("JPEG", "MPO", "WEBP"):
                raise MaskError(
                    f"{path} is a {image.format}, which changes ids: expected PNG or another lossless format"
                )
            image.load()
            return _ids(image, path, colours)
    except FileNotFoundError:
        raise MaskError(f"{path} does not exist: check the layout and the split") from None
    except MaskError:
        raise
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        raise MaskError(f"{path} cannot be read as a mask ({error}): get a whole copy of the file") from error


def _ids(image: Image.Image, path: Path, colours: np.ndarray | None) -> np.ndarray:
    if image.mode == "P":
        ids = np.asarray(image)
        return ids if colours is None else _by_palette(image, ids, colours)
    if image.mode in ("L", "1") or image.mode.startswith("I"):
        return np.asarray(image).astype(np.uint8 if image.mode in ("L", "1") else np.int64)
    if image.mode not in ("RGB", "RGBA", "LA"):
        raise MaskError(f"{path} is of mode {image.mode}: expected one channel of class ids")
    pixels = np.asarray(image.convert("RGB"))
    if (pixels == pixels[..., :1]).all():  # a grey picture saved with three channels
        if colours is None or not pixels.any():
            return pixels[..., 0]
        raise MaskError(f"{path} has three equal channels, neither ids nor the data set's colours: save one channel")
    if colours is None:
        raise MaskError(
            f"{path} holds colours (RGB), expected one channel of class ids: convert it, or name the data set whose "
            "colours they are by its layout (voc21 and voc20 read PASCAL VOC's)"
        )
    return _by_colour(pixels, colours, path)


def _by_colour(pixels: np.ndarray, colours: np.ndarray, path: Path) -> np.ndarray:
    """(H, W, 3) colours -> ids."""
    table = np.full(1 << 24, -1, dtype=np.int16)
    codes = colours.astype(np.int64) @ (1 << 16, 1 << 8, 1)
    table[codes[::-1]] = np.arange(255, -1, -1)
    found = table[pixels.astype(np.int64) @ (1 << 16, 1 << 8, 1)]
    if (found < 0).any():
        colour = pixels[tuple(np.argwhere(found < 0)[0])].tolist()
        raise MaskError(
            f"{path} holds the colour {colour}, which stands for no class: resized or compressed with loss? Expected "
            "the original file"
        )
    return found.astype(np.uint8)


def _by_palette(image: Image.Image, ids: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Indices, set right where a program that saved the file has sorted the palette anew."""
    palette = np.array(image.getpalette("RGB") or [], dtype=np.uint8).reshape(-1, 3)
    used = np.unique(ids)
    if used[-1] >= len(palette):
        return ids
    shown = {tuple(colour) for colour in palette[used].tolist()}
    known = {tuple(colour): i for i, colour in reversed(list(enumerate(colours.tolist())))}
    if not shown <= known.keys():
        return ids
    table = np.zeros(256, dtype=np.uint8)
    table[used] = [known[tuple(colour)] for colour in palette[used].tolist()]
    return table[ids]


class IdTable:
    """From the ids of a data set's masks to class indices.

    Args:
        ids: id -> class index, or 255 for void; all other ids are refused.
        hint: what an id outside these most likely means.
    """

    def __init__(self, ids: Mapping[int, int], hint: str):
        self.ids, self.hint = dict(ids), hint
        self._table = np.full(max(max(self.ids), 255) + 1, _UNKNOWN, dtype=np.uint8)
        self._table[list(self.ids)] = list(self.ids.values())

    def __call__(self, found: np.ndarray, path: Path) -> np.ndarray:
        """Turn a mask's ids into indices.

        Args:
            found: (H, W), integers.
            path: of the mask, for errors.

        Returns:
            (H, W) uint8: 0…K-1, and 255 for void.

        Raises:
            MaskError: an id that is on no list.
        """
        inside = found if found.dtype == np.uint8 else np.clip(found, -1, len(self._table))
        if inside is not found and (inside.min() < 0 or inside.max() >= len(self._table)):
            unknown = (inside < 0) | (inside >= len(self._table))
        else:
            indices = self._table[inside]
            unknown = indices == _UNKNOWN
            if not unknown.any():
                return indices
        ids = np.unique(found[unknown]).tolist()
        shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
        raise MaskError(f"{path} holds ids that are on no list: {shown}; expected {spans(self.ids)}. {self.hint}")


def spans(ids: Mapping[int, int]) -> str:
    """Write ids as ranges.

    Example:
        >>> spans({0: 0, 1: 1, 2: 2, 5: 3, 255: 255})
        '0…2, 5, 255'
    """
    runs: list[list[int]] = []
    for value in sorted(ids):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(f"{a}…{b}" if b > a else str(a) for a, b in runs)
