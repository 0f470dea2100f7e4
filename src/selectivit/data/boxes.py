"""`open_boxes`: pictures with boxes around their objects, from VOC's XML, COCO's JSON or masks of classes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from selectivit.data.box_files import find_coco, find_xml, read_coco, read_xml
from selectivit.data.box_types import Annotated, Box, BoxError
from selectivit.data.images import read_image
from selectivit.data.pairing import LayoutError

__all__ = ["Box", "BoxData", "BoxError", "boxes_in_crop", "open_boxes"]

KINDS = ("xml", "json", "masks")
SLACK = 1.0
"""Pixels that a box may reach beyond its picture before it is refused: roundings of annotation tools."""


@dataclass(frozen=True)
class BoxData:
    """Pictures and the boxes of their objects.

    Args:
        name: of the data.
        kind: "xml", "json" or "masks".
        pictures: the files.
        names: of the pictures.
        annotated: reads the boxes of the i-th picture.
        sources: the files that hold the boxes, for telling changes.
        missing: what is listed and not there, and why.
        notes: what was passed over.
    """

    name: str
    kind: str
    pictures: tuple[Path, ...]
    names: tuple[str, ...]
    annotated: Callable[[int], Annotated]
    sources: tuple[Path, ...]
    missing: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pictures)

    def name_of(self, i: int) -> str:
        """The i-th picture's name."""
        return self.names[i]

    def read(self, i: int) -> tuple[Image.Image, tuple[Box, ...]]:
        """Read the i-th picture and its boxes.

        Args:
            i: its number.

        Returns:
            The picture, 8-bit RGB, and its boxes in its pixels, inside it.

        Raises:
            ImageError: the picture cannot be read.
            BoxError: an ImageError; the annotation cannot be read, is of a picture of another size, or a box lies
                outside or has no area.
        """
        found = self.annotated(i)
        image = read_image(self.pictures[i]).image
        if found.size is not None and found.size != image.size:
            turned = found.size == image.size[::-1]
            hint = "the picture is turned by its EXIF data" if turned else "take both from one source, resize neither"
            raise BoxError(
                f"{found.source} is for {found.size[0]} x {found.size[1]} pixels, its picture {self.pictures[i]} has "
                f"{image.width} x {image.height}: {hint}"
            )
        return image, tuple(_inside(box, image.size, found.source) for box in found.boxes)


def open_boxes(
    path: str | os.PathLike[str],
    kind: str | None = None,
    *,
    split: str = "val",
    images: str | os.PathLike[str] | None = None,
    layout: str | None = None,
) -> BoxData:
    """Open pictures with boxes.

    Args:
        path: a COCO JSON file; a folder with annotations/instances_SPLIT*.json, with Annotations/*.xml and
            JPEGImages (or images), or with XML files beside their pictures; or one that `open_segmentation` reads,
            where a class's box is drawn around all of its pixels.
        kind: "xml", "json" or "masks"; None takes the first of them that is there.
        split: of VOC's ImageSets/Main, of COCO's file names, of masks. XML without lists of splits has none.
        images: the folder of the pictures, where it is not the usual one; for XML and JSON.
        layout: of masks, see `open_segmentation`.

    Returns:
        The data; pictures and XML files are not read yet.

    Raises:
        LayoutError: a ValueError; no such files or split, or none of the pictures is there.
        BoxError: a ValueError; a JSON file that is not COCO's.
        ValueError: what `open_segmentation` refuses.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> Image.new("RGB", (6, 4)).save(root / "a.jpg")
        >>> xml = "<annotation><object><name>dog</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>3</xmax>"
        >>> (root / "a.xml").write_text(xml + "<ymax>2</ymax></bndbox></object></annotation>") > 0
        True
        >>> open_boxes(root).read(0)[1]
        (Box(label='dog', left=0.0, top=0.0, right=3.0, bottom=2.0),)
    """
    root, pictures = Path(path), None if images is None else Path(images)
    if kind not in (None, *KINDS):
        raise LayoutError(f"expected boxes from {', '.join(KINDS)}, got {kind!r}")
    if not root.exists():
        raise LayoutError(f"{root} does not exist: expected a folder of pictures with boxes or masks, or a COCO JSON")
    if kind in (None, "json"):
        file = find_coco(root, split)
        if file is not None:
            return _data(root, "json", *read_coco(file, root, split, pictures))
        if kind == "json" or root.is_file():
            raise LayoutError(
                f"{root} holds no COCO JSON: expected a .json file, or annotations/instances_{split}*.json"
            )
    if kind in (None, "xml"):
        folder = find_xml(root)
        if folder is not None:
            return _data(root, "xml", *read_xml(folder, split, pictures))
        if kind == "xml":
            raise LayoutError(f"{root} holds no XML files: expected Annotations/*.xml, or some beside the pictures")
    return _from_masks(root, split, layout)


def _data(
    root: Path,
    kind: str,
    found: Sequence[tuple[str, Path, Callable[[], Annotated], Path]],
    missing: Sequence[tuple[str, str]],
    notes: Sequence[str],
) -> BoxData:
    if not found:
        raise LayoutError(
            f"none of the {len(missing)} pictures that {root} has boxes for is there, such as {missing[0][1]}: name "
            "their folder"
        )
    names, pictures, readers, sources = zip(*found, strict=True)
    unique = tuple(dict.fromkeys(sources))
    name = root.resolve().stem if root.is_file() else root.resolve().name
    return BoxData(name, kind, pictures, names, lambda i: readers[i](), unique, tuple(missing), tuple(notes))


def _from_masks(root: Path, split: str, layout: str | None) -> BoxData:
    from selectivit.data.segmentation import open_segmentation

    data = open_segmentation(root, layout, split)
    names, pictures, masks = zip(*data.pairs, strict=True)
    read = partial(_annotated_mask, data.mask, data.classes, masks, data.ignore_index)
    return BoxData(data.name, "masks", pictures, names, read, masks, notes=data.notes)


def _annotated_mask(
    read: Callable[[int], Tensor], classes: Sequence[str], files: Sequence[Path], void: int, i: int
) -> Annotated:
    """One box a class around all pixels that it has; background is no object."""
    from torchvision.ops import masks_to_boxes

    mask = read(i)
    there = [c for c in mask.unique().tolist() if c != void and classes[c] != "background"]
    if not there:
        return Annotated((), None, str(files[i]))
    edges = masks_to_boxes(mask == torch.tensor(there, dtype=mask.dtype)[:, None, None])  # (n, 4), both ends inside
    boxes = [
        Box(classes[int(c)], left, top, right + 1, bottom + 1)
        for c, (left, top, right, bottom) in zip(there, edges.tolist(), strict=True)
    ]
    return Annotated(tuple(boxes), (mask.shape[1], mask.shape[0]), str(files[i]))


def _inside(box: Box, size: tuple[int, int], source: str) -> Box:
    """The box cut at the picture's edges, which it may pass by a rounding."""
    edges = (box.left, box.top, box.right, box.bottom)
    told = f"{source}: the box of {box.label!r}, from ({box.left:g}, {box.top:g}) to ({box.right:g}, {box.bottom:g})"
    if not all(map(math.isfinite, edges)) or box.right <= box.left or box.bottom <= box.top:
        raise BoxError(f"{told}, has no area: expected its left and upper edge before its right and lower one")
    width, height = size
    beyond = max(-box.left, -box.top, box.right - width, box.bottom - height)
    if beyond > SLACK or box.left >= width or box.top >= height or box.right <= 0 or box.bottom <= 0:
        raise BoxError(f"{told}, lies outside its picture of {width} x {height} pixels: are both of one source?")
    left, top, right, bottom = max(0.0, box.left), max(0.0, box.top), min(box.right, width), min(box.bottom, height)
    return replace(box, left=left, top=top, right=float(right), bottom=float(bottom))


def boxes_in_crop(boxes: Sequence[Box], image_size: tuple[int, int], *, resize: int, size: int) -> Tensor:
    """Where boxes lie in a picture whose shorter side is resized and whose middle is cut out.

    Args:
        boxes: in the pixels of the picture.
        image_size: (width, height).
        resize: of the shorter side, pixels.
        size: of the crop's sides, pixels.

    Returns:
        (n, 4): left, top, right, bottom in the crop's pixels, cut at its edges; those outside are left out.

    Example:
        >>> boxes_in_crop([Box("dog", 0, 0, 20, 10)], (40, 20), resize=20, size=10).tolist()
        [[0.0, 0.0, 5.0, 5.0]]
    """
    from torchvision.transforms.v2 import functional
    from torchvision.tv_tensors import BoundingBoxes

    edges = torch.tensor([(b.left, b.top, b.right, b.bottom) for b in boxes], dtype=torch.float64).reshape(-1, 4)
    placed = BoundingBoxes(edges, format="XYXY", canvas_size=(image_size[1], image_size[0]))  # pyright: ignore[reportCallIssue]
    seen = functional.center_crop(functional.resize(placed, [resize]), [size]).as_subclass(Tensor)
    return seen[(seen[:, 2] > seen[:, 0]) & (seen[:, 3] > seen[:, 1])]
