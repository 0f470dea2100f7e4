"""Pictures in folders: which there are, in a fixed order, and what was asked for in vain."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = frozenset(".jpg .jpeg .jpe .jfif .png .webp .gif .tif .tiff .bmp .ppm .pgm .jp2 .avif".split())
"""Endings, in lower case, by which pictures are told in folders; a file that is named itself may have any ending."""


@dataclass(frozen=True)
class FoundImage:
    """A file that should be a picture.

    Args:
        path: where it is.
        root: the folder that was asked for; the file's own folder if the file itself was.
    """

    path: Path
    root: Path

    @property
    def name(self) -> Path:
        """The path below the root: what to name results after."""
        return self.path.relative_to(self.root)


def find_images(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[FoundImage], list[str]]:
    """Find the pictures among files and in folders.

    Folders are searched with all their subfolders, links followed, hidden files and folders skipped. The order is that
    of `paths`, sorted inside each folder; a file that is reached twice is listed once, the first time.

    Args:
        paths: files and folders.

    Returns:
        The files found, not opened yet; and problems in words: a path that does not exist or is no ordinary file, a
        folder without pictures, a folder that may not be read.

    Example:
        >>> find_images(["no/such.jpg"])
        ([], ['no/such.jpg does not exist'])
    """
    found: list[FoundImage] = []
    problems: list[str] = []
    seen: set[str] = set()
    for path in map(Path, [paths] if isinstance(paths, str | os.PathLike) else paths):
        if path.is_dir():
            matches = [FoundImage(file, path) for file in sorted(_pictures_below(path, problems))]
            if not matches:
                problems.append(f"{path} holds no pictures (files that end in {' '.join(sorted(SUFFIXES))})")
        elif path.is_file():
            matches = [FoundImage(path, path.parent)]
        elif path.exists():
            matches = []  # a pipe or a device: reading it may never end
            problems.append(f"{path} is no ordinary file")
        else:
            matches = []
            problems.append(f"{path} does not exist")
        for match in matches:
            name = printable(match.path)
            if name != str(match.path):
                problems.append(f"{name} has a name that is not UTF-8, which results cannot bear; rename it")
                continue
            real = os.path.realpath(match.path)
            if real not in seen:
                seen.add(real)
                found.append(match)
    return found, problems


def printable(path: str | os.PathLike[str]) -> str:
    r"""Spell a path so that it can be printed and written: bytes that are not UTF-8 as escapes.

    Args:
        path: any path that the system gives.

    Returns:
        The path, with escapes such as \xff where it is not UTF-8.

    Example:
        >>> printable("photo.jpg")
        'photo.jpg'
    """
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _pictures_below(folder: Path, problems: list[str]) -> Iterator[Path]:
    visited: set[str] = set()

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename} cannot be searched ({error.strerror})")

    for here, folders, files in os.walk(folder, followlinks=True, onerror=unreadable):
        real = os.path.realpath(here)
        if real in visited:  # a link that leads back
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES and Path(here, name).is_file():
                yield Path(here, name)
