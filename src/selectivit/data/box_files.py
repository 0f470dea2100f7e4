"""Files of boxes: PASCAL VOC's XML, one a picture, and COCO's JSON, one a split."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from selectivit.data.box_types import Annotated, Box, BoxError
from selectivit.data.find import SUFFIXES
from selectivit.data.pairing import LayoutError, files_below

Found = tuple[list[tuple[str, Path, Callable[[], Annotated], Path]], list[tuple[str, str]], list[str]]
"""Name, picture, reader and file of each; what is missing and why; notes."""

VOC_ROOTS = ("", "VOC2012", "VOCdevkit/VOC2012", "VOC2007", "VOCdevkit/VOC2007")


def find_xml(root: Path) -> Path | None:
    """The folder of a data set's XML files, or None."""
    for base in (root / name for name in VOC_ROOTS):
        for folder in (base / "Annotations", base / "annotations", base):
            if folder.is_dir() and next(folder.glob("*.xml"), None) is not None:
                return folder
    return None


def read_xml(folder: Path, split: str, images: Path | None) -> Found:
    """Bring XML files and pictures together, by their names.

    Args:
        folder: of the XML files.
        split: of ImageSets/Main, where that is there.
        images: of the pictures; None is JPEGImages or images beside the folder, else the folder itself.

    Returns:
        What was found.

    Raises:
        LayoutError: no such split, or no such folder of pictures.
    """
    base = folder.parent if folder.name.lower() == "annotations" else folder
    files = {path.stem: path for path in sorted(folder.glob("*.xml"))}
    notes, missing = [], []
    names, lists = list(files), base / "ImageSets" / "Main"
    if lists.is_dir():
        names = _split(lists, split)
        missing += [(n, f"{folder / n}.xml does not exist") for n in names if n not in files]
    else:
        notes.append(f"{base} has no ImageSets/Main: all of its {len(files)} XML files are taken")
    known = (base / "JPEGImages", base / "images", folder)
    place = images or next(p for p in known if p.is_dir())
    if not place.is_dir():
        raise LayoutError(f"{place} is no folder: expected the one that holds the pictures")
    pictures = {path.relative_to(place).with_suffix("").as_posix(): path for path in files_below(place, SUFFIXES)}
    found = []
    for name in names:
        if name in pictures and name in files:
            found.append((name, pictures[name], partial(_parse_xml, files[name]), files[name]))
        elif name in files:
            missing.append((str(files[name]), f"there is no picture {place / name}.jpg (or of another ending)"))
    alone = len(pictures.keys() - files.keys())
    if alone and not lists.is_dir():
        notes.append(f"{alone} pictures without an XML file are passed over")
    return found, missing, notes


def _split(lists: Path, split: str) -> list[str]:
    file = lists / f"{split}.txt"
    if not file.is_file():
        known = ", ".join(sorted(p.stem for p in lists.glob("*.txt") if "_" not in p.stem)) or "none"
        raise LayoutError(f"there is no split {split!r} ({file} does not exist); there are: {known}")
    names = [line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not names:
        raise LayoutError(f"{file} lists nothing: expected a name a line")
    return names


def _parse_xml(path: Path) -> Annotated:
    try:
        tree = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError, ValueError) as error:
        raise BoxError(f"{path} cannot be read as XML ({error}): get a whole copy of the file") from None
    if tree.tag != "annotation":
        raise BoxError(f"{path} holds <{tree.tag}>, expected PASCAL VOC's <annotation>")
    try:
        boxes = []
        for thing in tree.iterfind("object"):
            left, top, right, bottom = (float(_text(thing, f"bndbox/{n}")) for n in ("xmin", "ymin", "xmax", "ymax"))
            # VOC counts pixels from 1, and the last one belongs to the box.
            boxes.append(Box(_text(thing, "name").strip(), left - 1, top - 1, right, bottom))
        size = None
        if tree.find("size/width") is not None:
            size = int(_text(tree, "size/width")), int(_text(tree, "size/height"))
    except ValueError as error:
        raise BoxError(f"{path}: {error}; expected <object> with <name> and <bndbox>, in numbers") from None
    return Annotated(tuple(boxes), None if size == (0, 0) else size, str(path))


def _text(element: ElementTree.Element, name: str) -> str:
    text = element.findtext(name)
    if text is None:
        raise ValueError(f"<{element.tag}> without <{name.replace('/', '><')}>")
    return text


def find_coco(root: Path, split: str) -> Path | None:
    """A data set's COCO JSON, or None.

    Raises:
        LayoutError: there are some, and none or several of this split.
    """
    if root.is_file():
        return root if root.suffix.lower() == ".json" else None
    known = sorted((root / "annotations").glob("instances_*.json"))
    if not known:
        return None
    fits = [p for p in known if p.stem.removeprefix("instances_").startswith(split)]
    if len(fits) != 1:
        raise LayoutError(
            f"expected one file annotations/instances_{split}*.json in {root}, there are: "
            f"{', '.join(p.name for p in fits or known)}; give the file itself"
        )
    return fits[0]


def read_coco(file: Path, root: Path, split: str, images: Path | None) -> Found:
    """Read a COCO JSON and find its pictures.

    Args:
        file: the JSON.
        root: what was asked for: the file itself, or the folder above annotations.
        split: names the usual folder of pictures.
        images: of the pictures; None looks for the usual places.

    Returns:
        What was found.

    Raises:
        BoxError: no COCO JSON, or one whose parts do not fit each other.
        LayoutError: no such folder of pictures.
    """
    base = root if root.is_dir() else file.parent.parent if file.parent.name == "annotations" else file.parent
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        pictures = {entry["id"]: entry for entry in content["images"]}
        labels = {entry["id"]: str(entry["name"]) for entry in content["categories"]}
        boxes = _coco_boxes(content["annotations"], pictures, labels)
        listed = [(str(e["file_name"]), (int(e["width"]), int(e["height"])), boxes[e["id"]]) for e in pictures.values()]
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BoxError(
            f"{file} cannot be used ({reason}): expected COCO's JSON with images, annotations (each with bbox) and "
            "categories"
        ) from None
    if not listed:
        raise BoxError(f"{file} lists no pictures")
    place = images or _coco_pictures(file, base, listed[0][0])
    if not place.is_dir():
        raise LayoutError(f"{place} is no folder: expected the one that holds the pictures")
    found, missing = [], []
    for name, size, there in listed:
        path = place / name
        if path.is_file():
            annotated = Annotated(tuple(there), size, f"{file}, {name}")
            found.append((Path(name).with_suffix("").as_posix(), path, partial(_same, annotated), file))
        else:
            missing.append((name, f"{path} does not exist"))
    return found, missing, []


def _coco_boxes(entries: Sequence[Any], pictures: dict[Any, Any], labels: dict[Any, str]) -> dict[Any, list[Box]]:
    boxes: dict[Any, list[Box]] = {key: [] for key in pictures}
    strange = [e["id"] for e in entries if e["image_id"] not in boxes or e["category_id"] not in labels]
    if strange:
        raise ValueError(
            f"{len(strange)} of {len(entries)} annotations, such as {strange[0]}, are of pictures or categories that "
            "it does not list"
        )
    for entry in entries:
        left, top, width, height = (float(number) for number in entry["bbox"])
        boxes[entry["image_id"]].append(Box(labels[entry["category_id"]], left, top, left + width, top + height))
    return boxes


def _coco_pictures(file: Path, base: Path, first: str) -> Path:
    """The usual places, by where the first picture is; else the likeliest, which the error then names."""
    year = file.stem.removeprefix("instances_")
    places = [base / year, base / "images" / year, base / "images", base, file.parent]
    return next((p for p in places if (p / first).is_file()), next((p for p in places if p.is_dir()), base))


def _same(annotated: Annotated) -> Annotated:
    return annotated
