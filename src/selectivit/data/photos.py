"""Photos for training by their number, wherever they lie: folders, lists, tar shards, Hugging Face datasets."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from PIL import Image

from selectivit.data.find import find_images, printable
from selectivit.data.hub_dataset import HubDataset, is_saved_dataset
from selectivit.data.images import read_image
from selectivit.data.shards import TarShard

HUB = "hf:"


class PhotoSource(Protocol):
    """Some photos in a fixed order."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def name(self, index: int) -> str:
        """What to call one in messages; the same in every run."""
        ...

    def read(self, index: int, shorter_side: int | None = None) -> Image.Image:
        """One as 8-bit RGB; an `ImageError` where it cannot be read."""
        ...


class PhotoFiles:
    """Photos that are files.

    Args:
        paths: in their order.

    Example:
        >>> PhotoFiles(["a.jpg"]).name(0)
        'a.jpg'
    """

    def __init__(self, paths: Sequence[str]):
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The file's path."""
        return self.paths[index]

    def read(self, index: int, shorter_side: int | None = None) -> Image.Image:
        """Read and decode the file."""
        return read_image(self.paths[index], shorter_side=shorter_side).image


class Photos:
    """Several sources as one.

    Args:
        sources: in their order; empty ones do no harm.

    Example:
        >>> Photos([PhotoFiles(["a.jpg"]), PhotoFiles(["b.jpg", "c.jpg"])]).name(2)
        'c.jpg'
    """

    def __init__(self, sources: Sequence[PhotoSource]):
        self.sources = list(sources)
        self.ends = list(itertools.accumulate(len(source) for source in self.sources))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def name(self, index: int) -> str:
        """What its source calls it."""
        source, place = self._find(index)
        return source.name(place)

    def read(self, index: int, shorter_side: int | None = None) -> Image.Image:
        """Read it from its source."""
        source, place = self._find(index)
        return source.read(place, shorter_side)

    def _find(self, index: int) -> tuple[PhotoSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"expected a photo's number of 0 to {len(self) - 1}, got {index}")
        which = bisect.bisect_right(self.ends, index)
        return self.sources[which], index - (self.ends[which - 1] if which else 0)


class PhotoSubset:
    """Some of the photos, by their numbers.

    Args:
        photos: all of them.
        indices: which.

    Example:
        >>> PhotoSubset(PhotoFiles(["a.jpg", "b.jpg"]), [1]).name(0)
        'b.jpg'
    """

    def __init__(self, photos: PhotoSource, indices: Sequence[int]):
        self.photos, self.indices = photos, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        """What the whole calls it."""
        return self.photos.name(self.indices[index])

    def read(self, index: int, shorter_side: int | None = None) -> Image.Image:
        """Read it."""
        return self.photos.read(self.indices[index], shorter_side)


def open_photos(paths: Sequence[str | os.PathLike[str]]) -> tuple[Photos, list[str]]:
    """Find photos without opening them.

    Args:
        paths: any of: a photo; a folder, searched with its sub-folders for photos; a text file (.txt) with a path a
            line, relative to the file's own folder, and lines that start with # passed over; a tar shard (.tar); a
            folder that `datasets.save_to_disk` wrote; a dataset of the Hugging Face hub or its cache as hf:NAME or
            hf:NAME:SPLIT.

    Returns:
        The photos, and problems in words: what is not there, folders without photos.

    Raises:
        ValueError: a damaged tar file, a dataset without images, or one that cannot be loaded.

    Example:
        >>> photos, problems = open_photos(["no/such/folder"])
        >>> len(photos), problems
        (0, ['no/such/folder does not exist'])
    """
    sources: list[PhotoSource] = []
    problems: list[str] = []
    for given in map(str, paths):
        path = Path(given)
        if given.startswith(HUB):
            sources.append(HubDataset.from_hub(given.removeprefix(HUB)))
        elif path.suffix == ".tar" and path.is_file():
            sources.append(TarShard(path))
        elif path.suffix == ".txt" and path.is_file():
            sources.append(_listed(path))
        elif is_saved_dataset(path):
            sources.append(HubDataset.from_disk(path))
        else:
            found, told = find_images([path])
            problems += told
            sources.append(PhotoFiles([str(image.path) for image in found]))
    return Photos(sources), problems


def _listed(path: Path) -> PhotoFiles:
    """The photos of a list; those that are missing are told when they are read, as damaged ones are."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{printable(path)} is not a list of paths in UTF-8, one a line") from None
    names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return PhotoFiles([str(path.parent / name) for name in names])
