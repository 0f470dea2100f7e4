"""Rendered scenes as a folder: pictures, masks and classes as in data sets, and regions with captions (FG-OVD)."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selectivit.data.scene_layouts import ATTRIBUTES, CLASSES, SHAPES, Thing
from selectivit.data.scene_rendering import Scene, scene, to_image
from selectivit.data.writing import write_atomic, write_json

NEGATIVES = 10
LEVELS = {"1_attributes": 1, "2_attributes": 2, "3_attributes": 3, "shuffle_negatives": 4}
SEEN = 400  # pixels of an object that a region must show


def write_scenes(
    folder: str | os.PathLike[str],
    splits: Mapping[str, int],
    *,
    seed: int = 0,
    size: tuple[int, int] = (240, 320),
    tell: Callable[[str | None], None] = lambda _: None,
) -> list[Path]:
    """Render scenes into a folder.

    Written are images/SPLIT/00000.png, masks/SPLIT/00000.png (numbers of classes.json), classes.json, and of each
    split regions/SPLIT/KIND.json in the style of FG-OVD: 1_attributes, 2_attributes and 3_attributes (each negative
    differs in so many of colour, pattern and material), shuffle_negatives (in all, and in shape), color, pattern,
    material. The same call writes the same files.

    Args:
        folder: where; made if it is not there.
        splits: how many scenes of each, such as {"train": 0, "val": 300}; no two share a scene.
        seed: of all of them.
        size: (height, width) in pixels.
        tell: called after each scene.

    Returns:
        The pictures' files.

    Raises:
        ValueError: no scenes, a size below 32 px, or a folder with pictures of another origin.
        WriteError: the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> files = write_scenes(tempfile.mkdtemp(), {"val": 2}, size=(48, 64))
        >>> [file.name for file in files]
        ['00000.png', '00001.png']
    """
    if min(size) < 32 or not any(splits.values()) or min(splits.values()) < 0:
        raise ValueError(f"expected scenes of 32 px or more and at least one of them, got {size} and {dict(splits)}")
    root, found = Path(folder), []
    for split, count in splits.items():
        others = {file.name for file in (root / "images" / split).glob("*")} - {_name(i) for i in range(count)}
        if others:
            raise ValueError(
                f"{root / 'images' / split} holds {len(others)} other pictures ({min(others)}): choose another folder"
            )
    write_json(root / "classes.json", {str(i): name for i, name in enumerate(CLASSES)})
    for number, (split, count) in enumerate(sorted(splits.items())):
        scenes: dict[str, Scene] = {}
        for index in range(count):
            # Series of their own, so that a split does not depend on the size of the others.
            made, name = scene(seed * 1000 + number, index, size), f"{split}/{_name(index)}"
            for kind, pixels in (("images", made.image), ("masks", made.mask)):
                write_atomic(root / kind / name, _png(pixels))
            scenes[name] = made
            found.append(root / "images" / name)
            tell(None)
        for kind in (*LEVELS, *ATTRIBUTES) if count else ():
            write_json(root / "regions" / split / f"{kind}.json", region_file(scenes, kind, seed))
    return found


def _name(index: int) -> str:
    return f"{index:05d}.png"


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    to_image(pixels).save(file, "PNG")
    return file.getvalue()


def region_file(scenes: Mapping[str, Scene], kind: str, seed: int) -> dict[str, Any]:
    """Regions with a right caption and hard negatives, as FG-OVD's files have them.

    Args:
        scenes: by file name.
        kind: one of `LEVELS`, or of `ATTRIBUTES`: its negatives differ in that attribute alone.
        seed: of the negatives.

    Returns:
        What `selectivit.openvocab.regions.read_regions` reads, once written as JSON.

    Example:
        >>> content = region_file({"a.png": scene(0, 0)}, "color", 0)
        >>> content["annotations"][0].keys() >= {"id", "image_id", "bbox", "category_id", "neg_category_ids"}
        True
    """
    images, annotations, numbers = [], [], {}
    for place, (name, made) in enumerate(scenes.items()):
        rng = np.random.default_rng([seed, place, len(kind)])
        height, width = made.mask.shape
        images.append({"id": place, "file_name": name, "height": height, "width": width})
        for i, box in made.boxes().items():
            if (made.instances == i + 1).sum() < SEEN:
                continue
            thing = made.layout.things[i]
            captions = [_caption(thing), *_negatives(thing, kind, rng)]
            ids = [numbers.setdefault(text, len(numbers) + 1) for text in captions]
            entry = {"id": len(annotations) + 1, "image_id": place, "bbox": [float(side) for side in box]}
            annotations.append(entry | {"category_id": ids[0], "neg_category_ids": ids[1:]})
    categories = [{"id": number, "name": text} for text, number in numbers.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def _words(thing: Thing) -> dict[str, str]:
    return {name: getattr(thing, name) for name in (*ATTRIBUTES, "shape")}


def _caption(thing: Thing) -> str:
    return _said(_words(thing))


def _said(words: Mapping[str, str]) -> str:
    text = " ".join(words[name] for name in ("pattern", "color", "material", "shape"))
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"


def _negatives(thing: Thing, kind: str, rng: np.random.Generator) -> list[str]:
    """Captions that differ from the right one, at most `NEGATIVES`, no two alike."""
    right = _words(thing)
    if kind in ATTRIBUTES:
        others = [word for word in ATTRIBUTES[kind] if word != right[kind]]
        return [_said(right | {kind: str(word)}) for word in rng.permutation(others)[:NEGATIVES]]
    choices = {**ATTRIBUTES, "shape": SHAPES}
    found: dict[str, None] = {}
    while len(found) < NEGATIVES:
        names = list(choices) if LEVELS[kind] == len(choices) else rng.choice(list(ATTRIBUTES), LEVELS[kind], False)
        changed = {name: str(rng.choice([word for word in choices[name] if word != right[name]])) for name in names}
        found[_said(right | changed)] = None
    return list(found)
