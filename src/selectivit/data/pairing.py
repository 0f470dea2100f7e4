"""Pictures and their masks brought together: by lists, or by name in two folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MASK_SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".gif")


class LayoutError(ValueError):
    """A folder that is not laid out as it should be; the text says what was expected, what came, and what to do."""


@dataclass(frozen=True)
class Found:
    """The files of one split.

    Args:
        pairs: name, picture and mask of each.
        ids: from the masks' ids to class indices; 255 is void.
        split: the folder's own name for it.
        notes: what was passed over.
    """

    pairs: tuple[tuple[str, Path, Path], ...]
    ids: Mapping[int, int]
    split: str
    notes: tuple[str, ...] = ()


def listed(root: Path, lists: str, masks: tuple[str, ...], split: str) -> tuple[tuple[str, Path, Path], ...]:
    """Pairs that a text file lists, as in PASCAL's sets.

    Args:
        root: with JPEGImages.
        lists: folder of text files, one a split.
        masks: folders of masks; the first that holds a mask counts.
        split: name of a text file.

    Returns:
        Name, picture and mask of each.

    Raises:
        LayoutError: no such split, an empty one, or files that are missing.
    """
    file = root / lists / f"{split}.txt"
    if not file.is_file():
        known = sorted(p.stem for p in (root / lists).glob("*.txt"))
        raise LayoutError(
            f"{root} has no split {split!r} ({file} does not exist); it has: {', '.join(known) or 'none'}"
        )
    names = [line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not names:
        raise LayoutError(f"{file} lists nothing: expected a name a line")
    pairs, missing = [], []
    for name in names:
        mask = next((m for m in (root / folder / f"{name}.png" for folder in masks) if m.is_file()), None)
        image = root / "JPEGImages" / f"{name}.jpg"
        if mask is None or not image.is_file():
            missing.append(root / masks[0] / f"{name}.png" if mask is None else image)
        else:
            pairs.append((name, image, mask))
    if missing:
        raise LayoutError(
            f"{len(missing)} of {len(names)} files that {file} lists are missing, such as {missing[0]}: get a whole "
            "copy, or shorten the list"
        )
    return tuple(pairs)


def in_folders(root: Path, folder: str, split: str, known: Mapping[str, str]) -> str:
    """The name that a folder has for a split.

    Args:
        root: of the data set.
        folder: with a folder a split.
        split: as it was asked for.
        known: other names of splits, such as {"val": "validation"}.

    Returns:
        The name of a folder that is there.

    Raises:
        LayoutError: no such split.
    """
    name = known.get(split, split)
    if not (root / folder / name).is_dir():
        there = sorted(p.name for p in (root / folder).iterdir() if p.is_dir() and not p.name.startswith("."))
        raise LayoutError(
            f"{root} has no split {split!r} ({root / folder / name} does not exist); it has: "
            f"{', '.join(there) or 'none'}"
        )
    return name


def named(files: Iterable[Path], suffix: str, folder: Path) -> dict[str, Path]:
    """Files by their path below a folder without the suffix; an empty suffix is the ending of each.

    Raises:
        LayoutError: two files of one name.
    """
    found: dict[str, Path] = {}
    for path in sorted(files):
        name = path.relative_to(folder).as_posix().removesuffix(suffix or path.suffix)
        if name in found:
            raise LayoutError(f"{found[name]} and {path} have one name: take one of them out")
        found[name] = path
    return found


def files_below(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """Files with one of the endings, in the folder and below it, hidden ones left out."""
    wanted = set(suffixes)
    return [p for p in folder.rglob("*") if p.suffix.lower() in wanted and not p.name.startswith(".")]


def paired(
    images: Mapping[str, Path], masks: Mapping[str, Path], where: str, *, partial: bool = False
) -> tuple[tuple[tuple[str, Path, Path], ...], tuple[str, ...]]:
    """Bring pictures and masks of one name together.

    Args:
        images: pictures by name.
        masks: masks by name.
        where: folders, for errors.
        partial: whether pictures without a mask are passed over with a note.

    Returns:
        Name, picture and mask of each; and notes.

    Raises:
        LayoutError: pictures or masks alone, or none at all.
    """
    both = sorted(images.keys() & masks.keys())
    bare, orphans = sorted(images.keys() - masks.keys()), sorted(masks.keys() - images.keys())
    if not both:
        shown = [f"{len(names)} ({', '.join(sorted(names)[:2])})" if names else "none" for names in (images, masks)]
        raise LayoutError(
            f"no picture has a mask of its name in {where}: pictures: {shown[0]}; masks: {shown[1]}. Both must be "
            "called alike up to their endings"
        )
    if orphans or (bare and not partial):
        names, kind = (orphans, "masks without a picture") if orphans else (bare, "pictures without a mask")
        raise LayoutError(f"{where}: {len(names)} {kind}, such as {names[0]}: get a whole copy, or take them out")
    notes = (f"{len(bare)} pictures without a mask are left out",) if bare else ()
    return tuple((name, images[name], masks[name]) for name in both), notes
