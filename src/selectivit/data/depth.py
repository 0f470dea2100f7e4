"""`open_depth`: photos with a depth for every pixel, in the standard data sets' folders, or in your own."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from selectivit.data.depth_layouts import LAYOUTS, DepthLayout, DepthLayoutError
from selectivit.data.images import ImageError, read_image

__all__ = ["DepthData", "DepthError", "DepthLayoutError", "depth_layout_names", "open_depth"]

INVALID = 65535
LOOKED_AT = 8
KITTI_CROP = (352, 1216)
"""(height, width) of KITTI's benchmark, cut from the lower middle: above it the laser sees nothing."""


class DepthError(ImageError):
    """A file that cannot be used as a depth map; the text says what was expected and what to do."""


@dataclass(frozen=True)
class DepthData:
    """Photos with a depth map each.

    Args:
        name: of the data set, as it was opened.
        split: its name, or which part of the whole it is.
        pairs: name, photo and depth map of each.
        units: numbers in the file that make a metre.
        min_depth: metres; nearer pixels count for nothing.
        max_depth: metres; farther pixels count for nothing.
        rotated: the low three bits of each number stand at its top, as in SUN RGB-D.
        benchmark_crop: cut photo and depth to KITTI's benchmark.
        notes: what was passed over on opening.
    """

    name: str
    split: str
    pairs: tuple[tuple[str, Path, Path], ...]
    units: float
    min_depth: float = 1e-3
    max_depth: float = 10.0
    rotated: bool = False
    benchmark_crop: bool = False
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def name_of(self, i: int) -> str:
        """The i-th photo's name: its path without the ending."""
        return self.pairs[i][0]

    def image(self, i: int) -> Image.Image:
        """Read the i-th photo, 8-bit RGB.

        Raises:
            ImageError: it cannot be read.
        """
        image = read_image(self.pairs[i][1]).image
        if not self.benchmark_crop:
            return image
        top, left = self._corner(image.height, image.width, self.pairs[i][1])
        return image.crop((left, top, left + KITTI_CROP[1], top + KITTI_CROP[0]))

    def depth(self, i: int) -> Tensor:
        """Read the i-th depth map.

        Args:
            i: its number.

        Returns:
            (H, W) float32, metres at the map's own resolution; 0 where there is none.

        Raises:
            DepthError: an ImageError; it cannot be read, has another size than its photo, or holds no depth at all.
        """
        _, photo, path = self.pairs[i]
        numbers = _read_numbers(path)
        size = _size(photo)
        if numbers.shape != size:
            raise DepthError(
                f"{path} has {numbers.shape[1]} x {numbers.shape[0]} pixels and its photo {photo} {size[1]} x "
                f"{size[0]}: expected the same. Take depth that is registered to the photo, and do not resize either"
            )
        valid = (numbers > 0) & (numbers < INVALID)
        if not valid.any():
            told = "0" if not numbers.any() else "65535" if (numbers == INVALID).all() else "0 or 65535"
            raise DepthError(f"{path} holds {told} everywhere, which stands for no depth: get a whole copy of the file")
        if self.rotated:
            numbers = (numbers >> 3) | ((numbers << 13) & 0xFFFF)
        metres = np.where(valid, numbers / self.units, 0).astype(np.float32)
        inside = (metres >= self.min_depth) & (metres <= self.max_depth)
        depth = torch.from_numpy(np.where(inside, metres, 0))
        if self.benchmark_crop:
            top, left = self._corner(*size, path)
            depth = depth[top : top + KITTI_CROP[0], left : left + KITTI_CROP[1]].contiguous()
        return depth

    def _corner(self, height: int, width: int, path: Path) -> tuple[int, int]:
        if height < KITTI_CROP[0] or width < KITTI_CROP[1]:
            raise DepthError(
                f"{path} has {width} x {height} pixels: expected KITTI's {KITTI_CROP[1]} x {KITTI_CROP[0]} or more"
            )
        return height - KITTI_CROP[0], (width - KITTI_CROP[1]) // 2

    def part(self, first: float, last: float) -> DepthData:
        """A stretch of the pairs in the order of their names, such as the first four fifths."""
        start, end = (round(share * len(self)) for share in (first, last))
        told = f"{self.split}, {100 * first:g} to {100 * last:g} % in the order of names"
        return replace(self, pairs=self.pairs[start:end], split=told)


def _size(path: Path) -> tuple[int, int]:
    """(height, width) of a photo as it is seen."""
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(0x0112) in (5, 6, 7, 8)
            return image.size if turned else (image.height, image.width)
    except Exception:
        picture = read_image(path).image  # says what is wrong with it
        return picture.height, picture.width


def _read_numbers(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as image:
            if image.format in ("JPEG", "MPO", "WEBP"):
                raise DepthError(f"{path} is a {image.format}, which changes numbers: expected a 16-bit PNG or TIFF")
            if not image.mode.startswith("I"):
                raise DepthError(
                    f"{path} is of mode {image.mode}: expected one channel of 16 bits (a depth in its units)"
                )
            numbers = np.asarray(image).astype(np.int64)
    except FileNotFoundError:
        raise DepthError(f"{path} does not exist: check the layout and the split") from None
    except DepthError:
        raise
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        raise DepthError(f"{path} cannot be read as a depth map ({error}): get a whole copy of the file") from error
    if numbers.ndim != 2 or numbers.min() < 0 or numbers.max() > INVALID:
        raise DepthError(f"{path} holds {numbers.min()} to {numbers.max()}: expected 0 to 65535 in one channel")
    return numbers


def depth_layout_names() -> tuple[str, ...]:
    """The names that `open_depth` knows.

    Example:
        >>> depth_layout_names()
        ('nyu', 'sunrgbd', 'kitti', 'folder')
    """
    return tuple(LAYOUTS)


def open_depth(
    path: str | os.PathLike[str], layout: str | None = None, split: str = "val", *, units: float | None = None
) -> DepthData:
    """Open a folder of photos and 16-bit depth maps.

    Args:
        path: NYUv2, SUN RGB-D or KITTI as their depth benchmarks lay them out, or a folder of one's own: photos and
            maps side by side (`a.color.jpg`, `a.depth.png`), or in two folders (`rgb/a.jpg`, `depth/a.png`, or
            `rgb/train`, `depth/train`).
        layout: a name of `depth_layout_names()`; None finds out.
        split: "train", "val", another one that the folder has, or "all".
        units: numbers in the file that make a metre; None is the layout's own, 1000 (millimetres) for one's own folder.

    Returns:
        The pairs, not read yet but for a few depth maps.

    Raises:
        DepthLayoutError: a ValueError; no such layout or split, or photos and maps that do not pair.
        DepthError: a ValueError; no depth in any of the maps that are looked at, or another kind of file.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> Image.new("RGB", (6, 4)).save(root / "a.color.jpg")
        >>> Image.fromarray(np.full((4, 6), 1500, dtype=np.uint16)).save(root / "a.depth.png")
        >>> data = open_depth(root, split="all")
        >>> len(data), data.name_of(0), float(data.depth(0)[0, 0])
        (1, 'a', 1.5)
    """
    root = Path(path)
    if not root.is_dir():
        raise DepthLayoutError(f"{root} is no folder: expected one with photos and depth maps")
    known = _detect(root) if layout is None else LAYOUTS.get(layout)
    if known is None:
        close = difflib.get_close_matches(str(layout), LAYOUTS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DepthLayoutError(f"unknown layout {layout!r}; {hint}there are: {', '.join(LAYOUTS)}")
    if units is not None and not units > 0:
        raise DepthLayoutError(f"expected units above 0 that make a metre, got {units}")
    found = known.find(root, split)
    if not found.pairs:
        raise DepthLayoutError(
            f"{root} holds no photos with depth maps for layout {known.name}: expected {known.holds}"
        )
    data = DepthData(
        known.name,
        found.split,
        found.pairs,
        known.units if units is None else units,
        max_depth=known.max_depth,
        rotated=known.rotated,
        benchmark_crop=known.benchmark_crop,
        notes=found.notes,
    )
    _look(data)
    return data


def _detect(root: Path) -> DepthLayout:
    return next((known for known in LAYOUTS.values() if known.fits(root)), LAYOUTS["folder"])


def _look(data: DepthData) -> None:
    """Read some maps, so that wrong files are told at once."""
    count = min(LOOKED_AT, len(data))
    errors: list[ImageError] = []
    for place in sorted({i * (len(data) - 1) // max(1, count - 1) for i in range(count)}):
        try:
            depth = data.depth(place)
        except ImageError as error:
            errors.append(error)
            continue
        if bool((depth > 0).any()):
            return
        errors.append(
            DepthError(
                f"{data.pairs[place][2]} holds no depth of {data.min_depth:g} to {data.max_depth:g} m at "
                f"{data.units:g} units a metre: check --units"
            )
        )
    raise errors[0]
