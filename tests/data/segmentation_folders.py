"""Small folders in the layout of each standard data set, with masks whose indices are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from selectivit.data.masks import voc_colours

SIZE = (12, 8)  # width, height
NAMES = ("a", "b", "c")


def indices(i: int, classes: int, *, background: bool = False) -> np.ndarray:
    """(8, 12) of a few classes, the first and the last among them, and void in the corner."""
    found = np.random.default_rng(i).integers(0, classes, (SIZE[1], SIZE[0]))
    found[0, :3] = (0, classes - 1, 255)
    return found


def write_image(path: Path, i: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(100 + i).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_mask(path: Path, ids: np.ndarray, *, colours: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(ids.astype(np.uint8))
    if colours:
        image.putpalette(voc_colours().tobytes())
    image.save(path)


def as_ids(found: np.ndarray, first: int = 0, void: int = 255) -> np.ndarray:
    """Indices as ids from `first` on, void as `void`."""
    return np.where(found == 255, void, found + first)


def voc(root: Path, size: int) -> list[np.ndarray]:
    """VOC 2012; with size 20 the masks' background is void in the truth."""
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("\n".join(NAMES) + "\n")
    truth = [indices(i, size) for i in range(3)]
    for i, name in enumerate(NAMES):
        write_image(root / "JPEGImages" / f"{name}.jpg", i)
        ids = as_ids(truth[i]) if size == 21 else as_ids(truth[i], 1, (0, 255)[i % 2])
        write_mask(root / "SegmentationClass" / f"{name}.png", ids, colours=True)
    write_image(root / "JPEGImages" / "not_listed.jpg", 9)
    return truth


def context(root: Path, size: int) -> list[np.ndarray]:
    (root / "ImageSets" / "SegmentationContext").mkdir(parents=True)
    (root / "ImageSets" / "SegmentationContext" / "val.txt").write_text("\n".join(NAMES))
    truth = [indices(i, size) for i in range(3)]
    for i, name in enumerate(NAMES):
        write_image(root / "JPEGImages" / f"{name}.jpg", i)
        ids = as_ids(truth[i]) if size == 60 else as_ids(truth[i], 1, 0)
        write_mask(root / "SegmentationClassContext" / f"{name}.png", ids)
    return truth


def ade20k(root: Path) -> list[np.ndarray]:
    truth = [indices(i, 150) for i in range(3)]
    for i, name in enumerate(NAMES):
        write_image(root / "images" / "validation" / f"ADE_val_{name}.jpg", i)
        write_mask(root / "annotations" / "validation" / f"ADE_val_{name}.png", as_ids(truth[i], 1, 0))
    return truth


def coco(root: Path, size: int, end: str, gaps: tuple[int, ...] = ()) -> list[np.ndarray]:
    """COCO-Object (81, _instanceTrainIds) or COCO-Stuff (171, _labelTrainIds, or its own ids with gaps)."""
    known = np.array([i for i in range(size + len(gaps)) if i not in gaps])
    truth = [indices(i, size) for i in range(3)]
    for i in range(3):
        write_image(root / "images" / "val2017" / f"00000000000{i}.jpg", i)
        ids = np.where(truth[i] == 255, 255, known[np.minimum(truth[i], size - 1)])
        write_mask(root / "annotations" / "val2017" / f"00000000000{i}{end}", ids)
    return truth


def cityscapes(root: Path, kind: str) -> list[np.ndarray]:
    label_ids = np.array([7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33])
    truth = [indices(i, 19) for i in range(3)]
    for i in range(3):
        name = f"bonn/bonn_00000{i}_000019"
        write_image(root / "leftImg8bit" / "val" / f"{name}_leftImg8bit.png", i)
        ids = np.where(truth[i] == 255, 4, label_ids[np.minimum(truth[i], 18)]) if kind == "labelIds" else truth[i]
        write_mask(root / "gtFine" / "val" / f"{name}_gtFine_{kind}.png", ids)
    return truth


def own(root: Path, *, split: str | None = "val", names: dict[int, str] | None = None) -> list[np.ndarray]:
    """images/, masks/ and classes.json; without one the largest id is 4."""
    truth = [indices(i, 5 if names is None else len(names)) for i in range(3)]
    for i, name in enumerate(NAMES):
        write_image(root / "images" / (split or "") / f"{name}.png", i)
        ids = truth[i] if names is None else np.vectorize(lambda v: 255 if v == 255 else list(names)[v])(truth[i])
        write_mask(root / "masks" / (split or "") / f"{name}.png", ids)
    if names is not None:
        (root / "classes.json").write_text(json.dumps({str(k): v for k, v in names.items()}))
    return truth
