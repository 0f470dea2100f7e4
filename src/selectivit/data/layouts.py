"""Where the standard data sets keep pictures and masks, and how their masks count the classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from selectivit.data.find import SUFFIXES
from selectivit.data.masks import VOID
from selectivit.data.pairing import Found, LayoutError, files_below, in_folders, listed, named, paired


@dataclass(frozen=True)
class Layout:
    """How one data set lies in folders.

    Args:
        classes: name of its class list.
        size: how many classes are scored.
        holds: patterns below the root, alternatives with a bar between; a folder with all of them has this layout.
        inside: folders below the given one in which the root may lie.
        find: from the root and a split to its files.
        hint: what an id outside the list most likely means.
    """

    classes: str
    size: int
    holds: tuple[str, ...]
    inside: tuple[str, ...]
    find: Callable[[Path, str], Found]
    hint: str

    def root(self, path: Path) -> Path | None:
        """The folder at or below the path that has this layout; None where there is none."""
        for root in (path, *(path / name for name in self.inside)):
            if all(any(_there(root, one) for one in pattern.split("|")) for pattern in self.holds):
                return root
        return None


def _there(root: Path, pattern: str) -> bool:
    return next(root.glob(pattern), None) is not None


def counted(first: int, size: int, *void: int) -> dict[int, int]:
    """Ids that start at `first`, and those of void.

    Example:
        >>> counted(1, 3, 0)
        {1: 0, 2: 1, 3: 2, 0: 255}
    """
    return {first + i: i for i in range(size)} | dict.fromkeys(void, VOID)


# ---- the data sets


def _voc(first: int, size: int, *void: int) -> Callable[[Path, str], Found]:
    def find(root: Path, split: str) -> Found:
        pairs = listed(root, "ImageSets/Segmentation", ("SegmentationClass", "SegmentationClassAug"), split)
        return Found(pairs, counted(first, size, *void), split)

    return find


def _context(first: int, size: int, *void: int) -> Callable[[Path, str], Found]:
    def find(root: Path, split: str) -> Found:
        pairs = listed(root, "ImageSets/SegmentationContext", ("SegmentationClassContext",), split)
        return Found(pairs, counted(first, size, *void), split)

    return find


def _ade20k(root: Path, split: str) -> Found:
    name = in_folders(root, "annotations", split, {"val": "validation", "train": "training"})
    images, masks = root / "images" / name, root / "annotations" / name
    both = paired(
        named(files_below(images, SUFFIXES), "", images),
        named(files_below(masks, [".png"]), "", masks),
        f"{images} and {masks}",
    )
    return Found(both[0], counted(1, 150, 0), name)


COCO_SPLITS = {"val": "val2017", "train": "train2017"}


def _coco_object(root: Path, split: str) -> Found:
    name = in_folders(root, "annotations", split, COCO_SPLITS)
    images, masks = root / "images" / name, root / "annotations" / name
    end = "_instanceTrainIds.png"
    found = named(masks.glob(f"*{end}"), end, masks)
    pairs, _ = paired(named(files_below(images, SUFFIXES), "", images), found, f"{images} and {masks}/*{end}")
    return Found(pairs, counted(0, 81, VOID), name)


STUFF_GAPS = (11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90)


def stuff_ids() -> dict[int, int]:
    """COCO-Stuff's own ids, 0 to 181 with eleven gaps, as class indices.

    Example:
        >>> ids = stuff_ids()
        >>> ids[10], ids[12], ids[181], 11 in ids
        (10, 11, 170, False)
    """
    known = [i for i in range(182) if i not in STUFF_GAPS]
    return {value: i for i, value in enumerate(known)} | {VOID: VOID}


def _coco_stuff(root: Path, split: str) -> Found:
    name = in_folders(root, "annotations", split, COCO_SPLITS)
    images, masks = root / "images" / name, root / "annotations" / name
    pictures, end = named(files_below(images, SUFFIXES), "", images), "_labelTrainIds.png"
    converted = named(masks.glob(f"*{end}"), end, masks)
    if converted:
        pairs, _ = paired(pictures, converted, f"{images} and {masks}/*{end}")
        return Found(pairs, counted(0, 171, VOID), name)
    own = {n: p for n, p in named(masks.glob("*.png"), "", masks).items() if not n.endswith("TrainIds")}
    pairs, _ = paired(pictures, own, f"{images} and {masks}")
    return Found(pairs, stuff_ids(), name)


CITY_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


def city_ids() -> dict[int, int]:
    """Cityscapes' label ids, 0 to 33, as indices of its 19 classes; the others are void.

    Example:
        >>> ids = city_ids()
        >>> ids[7], ids[33], ids[0]
        (0, 18, 255)
    """
    return dict.fromkeys(range(34), VOID) | {value: i for i, value in enumerate(CITY_IDS)}


def _cityscapes(root: Path, split: str) -> Found:
    name = in_folders(root, "gtFine", split, {})
    images, masks = root / "leftImg8bit" / name, root / "gtFine" / name
    end = "_leftImg8bit.png"
    pictures = named(images.glob(f"*/*{end}"), end, images)
    for end, ids in (("_gtFine_labelTrainIds.png", counted(0, 19, VOID)), ("_gtFine_labelIds.png", city_ids())):
        found = named(masks.glob(f"*/*{end}"), end, masks)
        if found:
            return Found(paired(pictures, found, f"{images} and {masks}/*/*{end}")[0], ids, name)
    raise LayoutError(f"{masks} holds no */*_gtFine_labelTrainIds.png and no */*_gtFine_labelIds.png")


_VOC = ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation")
_CONTEXT = ("JPEGImages", "SegmentationClassContext", "ImageSets/SegmentationContext")
_ADE = ("images/training|images/validation", "annotations/training|annotations/validation")
_STUFF = ("images/*2017", "annotations/*2017/*_labelTrainIds.png|annotations/*2017/*[0-9].png")
_VOC_HINT = "The masks are not PASCAL VOC's, whose ids are 0 for background, 1…20, and 255 for void"
_CONTEXT_HINT = (
    "Expected masks as MMSegmentation's converter writes them (0 for all other classes, 1…59), not the 459 classes of "
    "the original annotation"
)
_ADE_HINT = (
    "ADE20K's masks hold 0 for 'other' and 1…150; 255 tells masks that were shifted down already, larger ids those of "
    "the full data set"
)
_OBJECT_HINT = "Expected 0 for background and 1…80; larger ids tell COCO's own (up to 90) or COCO-Stuff's"
_STUFF_HINT = (
    "*_labelTrainIds.png count 0…170 without gaps, COCO-Stuff's own masks 0…181 with 11 gaps: the files have the ids "
    "of the other kind, or are of another data set"
)
_CITY_HINT = "*_labelTrainIds.png hold 0…18 and 255, *_labelIds.png hold 0…33: the file has the ids of the other kind"

LAYOUTS: dict[str, Layout] = {
    "voc21": Layout("voc", 21, _VOC, ("VOC2012", "VOCdevkit/VOC2012"), _voc(0, 21, VOID), _VOC_HINT),
    "voc20": Layout("voc", 20, _VOC, ("VOC2012", "VOCdevkit/VOC2012"), _voc(1, 20, 0, VOID), _VOC_HINT),
    "context60": Layout(
        "context", 60, _CONTEXT, ("VOC2010", "VOCdevkit/VOC2010"), _context(0, 60, VOID), _CONTEXT_HINT
    ),
    "context59": Layout(
        "context", 59, _CONTEXT, ("VOC2010", "VOCdevkit/VOC2010"), _context(1, 59, 0, VOID), _CONTEXT_HINT
    ),
    "ade20k": Layout("ade20k", 150, _ADE, ("ADEChallengeData2016",), _ade20k, _ADE_HINT),
    "coco_object": Layout(
        "coco_object", 81, ("images", "annotations/*/*_instanceTrainIds.png"), (), _coco_object, _OBJECT_HINT
    ),
    "coco_stuff": Layout("coco_stuff", 171, _STUFF, (), _coco_stuff, _STUFF_HINT),
    "cityscapes": Layout("cityscapes", 19, ("leftImg8bit", "gtFine"), (), _cityscapes, _CITY_HINT),
}
"""Name -> layout; pairs with and without background share a folder."""
