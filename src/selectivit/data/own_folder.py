"""A folder of one's own: images/, masks/ and classes.json, with or without a folder a split."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from selectivit.data.class_lists import ClassList, own_classes
from selectivit.data.find import SUFFIXES
from selectivit.data.masks import MAX_CLASSES, VOID, read_ids
from selectivit.data.pairing import MASK_SUFFIXES, Found, LayoutError, files_below, in_folders, named, paired

LOSSY = (".jpg", ".jpeg", ".webp")  # named in the error rather than passed over
OWN_HINT = "Ids must be those of classes.json; name those that count for nothing 'void' there"
WHOLE = "all"


def is_own(root: Path) -> bool:
    """Whether a folder has images/ and masks/."""
    return (root / "images").is_dir() and (root / "masks").is_dir()


def find_own(root: Path, split: str) -> tuple[Found, ClassList]:
    """Find the pairs and classes of a folder of one's own.

    Args:
        root: with images/, masks/ and perhaps classes.json.
        split: of images/<split> and masks/<split>; a folder without splits has only "val", which is all of it.

    Returns:
        The files, and the classes: those of classes.json, or one an id ("0", "1", …) up to the largest that occurs.

    Raises:
        LayoutError: no such folders or split, or pictures and masks that do not pair.
        ClassListError: a classes.json that cannot be used.
    """
    if not is_own(root):
        raise LayoutError(f"{root} is not laid out as folder: expected images and masks below it")
    images, masks, split = _folders(root, split)
    suffixes = (*MASK_SUFFIXES, *LOSSY)
    pictures = named(files_below(images, SUFFIXES), "", images)
    found = named(files_below(masks, suffixes), "", masks)
    pairs, notes = paired(pictures, found, f"{images} and {masks}", partial=True)
    ids, names = _ids(root, pairs)
    source = "the folder's own classes.json" if (root / "classes.json").is_file() else "the ids that the masks hold"
    classes = ClassList(root.resolve().name, tuple(names), tuple((name,) for name in names), source)
    return Found(pairs, ids, split, notes), classes


def _folders(root: Path, split: str) -> tuple[Path, Path, str]:
    images, masks = root / "images", root / "masks"
    if any(p.is_dir() and (images / p.name).is_dir() for p in masks.iterdir()):
        name = in_folders(root, "masks", split, {})
        in_folders(root, "images", split, {})
        return images / name, masks / name, name
    if split not in ("val", WHOLE):
        raise LayoutError(f"{root} has no split {split!r}: its images and masks lie in one folder each, which is 'val'")
    return images, masks, WHOLE


def _ids(root: Path, pairs: tuple[tuple[str, Path, Path], ...]) -> tuple[dict[int, int], list[str]]:
    """From ids to indices, and the classes' names."""
    file = root / "classes.json"
    if file.is_file():
        names, void = own_classes(file)
        ids = {value: i for i, value in enumerate(names)} | dict.fromkeys(void, VOID)
        return ids if VOID in names else ids | {VOID: VOID}, list(names.values())
    largest = -1
    for _, _, mask in pairs:
        found = np.unique(read_ids(mask))
        largest = max(largest, *found[found != VOID].tolist(), -1)
        if largest >= MAX_CLASSES:
            raise LayoutError(
                f"{mask} holds the id {largest}: with more than {MAX_CLASSES} ids, write {file} with those that count"
            )
    if largest < 0:
        raise LayoutError(f"all masks below {root / 'masks'} hold nothing but 255, void")
    return {i: i for i in range(largest + 1)} | {VOID: VOID}, [str(i) for i in range(largest + 1)]
