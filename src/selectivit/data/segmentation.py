"""`open_segmentation`: pictures and masks of classes in the standard data sets' folders, or in your own."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from selectivit.data.class_lists import ClassList, standard_classes
from selectivit.data.images import ImageError, read_image
from selectivit.data.layouts import LAYOUTS
from selectivit.data.masks import MAX_CLASSES, VOID, IdTable, MaskError, read_ids, spans, voc_colours
from selectivit.data.own_folder import OWN_HINT, find_own, is_own
from selectivit.data.pairing import Found, LayoutError

__all__ = ["ClassList", "LayoutError", "MaskError", "SegmentationData", "layout_names", "open_segmentation"]

LOOKED_AT = 8
"""Masks, spread over the split, that are read on opening, so that a wrong layout shows before the work starts."""
OWN = "folder"


@dataclass(frozen=True)
class SegmentationData:
    """Pictures with a mask of classes each.

    Args:
        name: of the data set.
        layout: which one it was opened as.
        split: the folder's own name for it.
        classes: names, in the order of the masks' indices.
        words: for each class the words that open-vocabulary methods look for; mostly its name alone.
        source: where names and words come from.
        pairs: name, picture and mask of each.
        table: from the files' ids to indices.
        notes: what was passed over on opening.
    """

    name: str
    layout: str
    split: str
    classes: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    source: str
    pairs: tuple[tuple[str, Path, Path], ...]
    table: IdTable
    notes: tuple[str, ...] = ()
    ignore_index: int = VOID

    def __len__(self) -> int:
        return len(self.pairs)

    def name_of(self, i: int) -> str:
        """The i-th picture's name: its path below the split without the ending."""
        return self.pairs[i][0]

    def image(self, i: int) -> Image.Image:
        """Read the i-th picture, 8-bit RGB.

        Args:
            i: its number.

        Returns:
            The picture, the right way up.

        Raises:
            ImageError: it cannot be read.
        """
        return read_image(self.pairs[i][1]).image

    def mask(self, i: int) -> Tensor:
        """Read the i-th mask.

        Args:
            i: its number.

        Returns:
            (H, W) uint8 at the label's own resolution: 0…K-1, and 255 (`ignore_index`) for void.

        Raises:
            MaskError: an ImageError; it cannot be read, has another size than the picture, or ids that are on no list.
        """
        _, picture, path = self.pairs[i]
        ids = read_ids(path, voc_colours() if self.layout.startswith("voc") else None)
        size = _size(picture)
        if size != ids.shape:
            hint = "; its sides are swapped: the picture is turned by its EXIF data" if size == ids.shape[::-1] else ""
            raise MaskError(
                f"{path} has {ids.shape[1]} x {ids.shape[0]} pixels and its picture {picture} {size[1]} x {size[0]}: "
                f"expected the same{hint}. Take the files of one source and do not resize either"
            )
        return torch.from_numpy(self.table(ids, path))


def _size(path: Path) -> tuple[int, int]:
    """(height, width) of a picture, as it is seen, from its file's header."""
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(0x0112) in (5, 6, 7, 8)
            return image.size if turned else (image.height, image.width)
    except Exception:
        picture = read_image(path).image  # says what is wrong with it
        return picture.height, picture.width


def layout_names() -> tuple[str, ...]:
    """The names that `open_segmentation` knows.

    Example:
        >>> layout_names()[:2], layout_names()[-1]
        (('voc21', 'voc20'), 'folder')
    """
    return (*LAYOUTS, OWN)


def open_segmentation(path: str | os.PathLike[str], layout: str | None = None, split: str = "val") -> SegmentationData:
    """Open a folder of pictures and masks of classes.

    Args:
        path: the data set's folder as its authors, or MMSegmentation's converters, lay it out; or one of your own with
            images/ and masks/ (or images/val, masks/val and so on) and, to name the ids, classes.json.
        layout: a name of `layout_names()`: "voc20" and "context59" leave background out as void, where "voc21" and
            "context60" score it; None finds out, with background.
        split: "val", "train" or another one that the folder has.

    Returns:
        The pairs, not read yet but for a few masks.

    Raises:
        LayoutError: a ValueError; no such layout or split, pictures and masks that do not pair, masks that all are
            void.
        ClassListError: a ValueError; a classes.json that cannot be used.
        MaskError: a ValueError; masks of another size, in colours, or with ids that are on no list.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> for folder in ("images", "masks"):
        ...     (root / folder).mkdir()
        >>> Image.new("RGB", (6, 4)).save(root / "images" / "a.jpg")
        >>> Image.new("L", (6, 4), 1).save(root / "masks" / "a.png")
        >>> (root / "classes.json").write_text('["road", "sky"]') > 0
        True
        >>> data = open_segmentation(root)
        >>> len(data), data.classes, data.mask(0).shape, int(data.mask(0)[0, 0])
        (1, ('road', 'sky'), torch.Size([4, 6]), 1)
    """
    root = Path(path)
    if not root.is_dir():
        raise LayoutError(f"{root} is no folder: expected one of a data set with masks of classes")
    layout = _detect(root) if layout is None else layout
    if layout == OWN:
        found, classes = find_own(root, split)
        data = _data(found, layout, classes, OWN_HINT)
    else:
        data = _standard(root, layout, split)
    _look(data)
    return data


def _standard(root: Path, layout: str, split: str) -> SegmentationData:
    known = LAYOUTS.get(layout)
    if known is None:
        close = difflib.get_close_matches(layout, layout_names(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise LayoutError(f"unknown layout {layout!r}; {hint}there are: {', '.join(layout_names())}")
    below = known.root(root)
    if below is None:
        raise LayoutError(f"{root} is not laid out as {layout}: expected {_expected(layout)} below it")
    found, classes = known.find(below, split), standard_classes(known.classes)
    if len(classes.names) > known.size:
        classes = classes.foreground()
    return _data(found, layout, classes, known.hint)


def _data(found: Found, layout: str, classes: ClassList, hint: str) -> SegmentationData:
    if len(classes.names) > MAX_CLASSES:
        raise LayoutError(f"{len(classes.names)} classes: at most {MAX_CLASSES} can be told from void (255) here")
    table = IdTable(found.ids, hint)
    named = (classes.title, layout, found.split, classes.names, classes.words, classes.source)
    return SegmentationData(*named, found.pairs, table, found.notes)


def _expected(layout: str) -> str:
    return ", ".join(LAYOUTS[layout].holds).replace("|", " or ")


def _detect(root: Path) -> str:
    """The layout of a folder; of two that differ by background alone, the one with it."""
    fits = [name for name, known in LAYOUTS.items() if name not in ("voc20", "context59") and known.root(root)]
    if is_own(root):
        fits.append(OWN)
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise LayoutError(f"{root} fits more than one layout: say which, {', '.join(fits)}")
    wanted = "\n".join(f"  {name}: {_expected(name)}" for name in LAYOUTS)
    raise LayoutError(f"{root} has none of the layouts that are known:\n{wanted}\n  {OWN}: images, masks")


def _look(data: SegmentationData) -> None:
    """Read some masks, so that a wrong layout is told at once.

    Raises:
        MaskError: ids or colours that do not fit, or sizes.
        LayoutError: nothing but void.
    """
    count = min(LOOKED_AT, len(data))
    places = sorted({i * (len(data) - 1) // max(1, count - 1) for i in range(count)})
    errors, seen = [], False
    for place in places:
        try:
            seen = bool((data.mask(place) != VOID).any()) or seen
        except ImageError as error:
            errors.append(error)
    if len(errors) == len(places):
        raise errors[0]  # one bad file is told when its turn comes, a folder of them now
    if not seen and not errors:
        raise LayoutError(
            f"all {len(places)} masks looked at, such as {data.pairs[places[0]][2]}, hold nothing but void for layout "
            f"{data.layout}: expected ids {ids_of_classes(data.table.ids)}. {data.table.hint}"
        )


def ids_of_classes(ids: Mapping[int, int]) -> str:
    """Write the ids that stand for classes, as ranges.

    Example:
        >>> ids_of_classes({0: 255, 1: 0, 2: 1, 255: 255})
        '1…2'
    """
    return spans({key: index for key, index in ids.items() if index != VOID})
