"""Photos in a folder a class, as ImageNet and torchvision's ImageFolder keep them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from selectivit.data.find import find_images
from selectivit.data.photos import PhotoFiles


@dataclass(frozen=True)
class ImageFolder:
    """One split of labelled photos.

    Args:
        root: the folder that holds the splits.
        split: its name.
        classes: names in alphabetical order, which numbers them.
        photos: sorted by class, then by name.
        labels: of each photo, the number of its class.
    """

    root: Path
    split: str
    classes: tuple[str, ...]
    photos: PhotoFiles
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)


def open_image_folder(root: str | os.PathLike[str], split: str) -> ImageFolder:
    """Find the photos of a split without opening them.

    Args:
        root: a folder ROOT with ROOT/SPLIT/CLASS/**/*.jpg.
        split: such as "train" or "val".

    Returns:
        The split.

    Raises:
        ValueError: no such folder or split, fewer than two classes, or a class without photos.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (root / "val" / name).mkdir(parents=True)
        ...     _ = (root / "val" / name / "1.jpg").write_bytes(b"")
        >>> found = open_image_folder(root, "val")
        >>> found.classes, found.labels
        (('cat', 'dog'), (0, 1))
    """
    root = Path(root)
    folder = root / split
    if not root.is_dir():
        raise ValueError(f"expected a folder with a folder a split in it, got {root}: it is no folder")
    if not folder.is_dir():
        there = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) or "none"
        raise ValueError(f"{root} has no split {split!r}: expected {folder}; the folders there are: {there}")
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(names) < 2:
        told = f"one class only ({names[0]})" if names else "no folders of classes"
        raise ValueError(f"{folder} has {told}: expected two or more folders, each with the photos of a class")
    paths, labels = [], []
    for number, name in enumerate(names):
        found, problems = find_images([folder / name])
        if not found:
            raise ValueError("; ".join(problems) + ": remove the folder or fill it")
        paths += [str(image.path) for image in found]
        labels += [number] * len(found)
    return ImageFolder(root, split, tuple(names), PhotoFiles(paths), tuple(labels))


def check_same_classes(train: ImageFolder, val: ImageFolder) -> None:
    """Refuse two splits whose numbers do not mean the same classes.

    Args:
        train: one split.
        val: the other.

    Raises:
        ValueError: the splits' classes differ.
    """
    if train.classes == val.classes:
        return
    only = [sorted(set(a.classes) - set(b.classes)) for a, b in ((train, val), (val, train))]
    told = "; ".join(
        f"only in {split}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
        for split, names in zip((train.split, val.split), only, strict=True)
        if names
    )
    raise ValueError(f"expected the same folders of classes in both splits of {train.root}; {told}")
