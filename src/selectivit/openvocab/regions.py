"""Regions and captions (FG-OVD): the benchmark's files, and the figures that it reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SUBSETS = {
    "1_attributes": "hard",
    "2_attributes": "medium",
    "3_attributes": "easy",
    "shuffle_negatives": "trivial",
    "color": "color",
    "material": "material",
    "pattern": "pattern",
    "transparency": "transparency",
}
"""Official file -> difficulty (in how many attributes the negatives differ), or the attribute in which they do."""

MHME = ("hard", "medium", "easy")
"""The difficulties whose mean top-1 is mHME; trivial negatives are left out."""


@dataclass(frozen=True)
class Region:
    """A box in a photo, and what might be in it.

    Args:
        number: of the annotation.
        photo: file name, with folders as the file gives them.
        box: (left, top, width, height) in pixels of the photo.
        captions: the right one first, then its hard negatives.
        photo_size: (width, height) of the photo that the box was drawn on; None where the file does not say.
    """

    number: int
    photo: str
    box: tuple[float, float, float, float]
    captions: tuple[str, ...]
    photo_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class RegionRanks:
    """How the right captions ranked.

    Args:
        ranks: by the annotation's number: 1 is right; a negative as near as the right caption comes before it.
        missing: photos that were not there or could not be used, with the reason.
    """

    ranks: dict[int, int]
    missing: dict[str, str]

    def summary(self) -> dict[str, float]:
        """Share of regions whose right caption came first, the mean and the median rank.

        Raises:
            ValueError: no region was ranked.
        """
        if not self.ranks:
            raise ValueError(f"no region was ranked: {len(self.missing)} photos are missing")
        return rank_figures(list(self.ranks.values()))


def rank_figures(ranks: Sequence[int]) -> dict[str, float]:
    """Put ranks in numbers.

    Args:
        ranks: one or more, 1 is right.

    Returns:
        "top1", the share of ranks that are 1, "mean_rank" and "median_rank".

    Example:
        >>> rank_figures([1, 1, 4, 6])
        {'top1': 0.5, 'mean_rank': 3.0, 'median_rank': 2.5}
    """
    found = torch.tensor(ranks, dtype=torch.float64)
    middle = found.quantile(0.5).item()
    return {"top1": (found == 1).double().mean().item(), "mean_rank": found.mean().item(), "median_rank": middle}


def chance(regions: Iterable[Region]) -> float:
    """The top-1 that drawing captions at random would give.

    Args:
        regions: one or more.

    Returns:
        The mean of 1 / captions.

    Example:
        >>> chance([Region(1, "a.jpg", (0, 0, 1, 1), ("red", "blue"))])
        0.5
    """
    shares = [1 / len(region.captions) for region in regions]
    return sum(shares) / len(shares)


def mean_hard_medium_easy(top1: Mapping[str, float]) -> float | None:
    """mHME: the mean top-1 of the hard, medium and easy negatives.

    Args:
        top1: by subset, as `SUBSETS` names them.

    Returns:
        The mean; None where one of the three is not there.

    Example:
        >>> round(mean_hard_medium_easy({"hard": 5.87, "medium": 13.01, "easy": 11.01, "trivial": 50.0}), 2)
        9.96
    """
    return sum(top1[name] for name in MHME) / 3 if top1.keys() >= set(MHME) else None


def subset_name(path: str | os.PathLike[str]) -> str:
    """Tell a file's difficulty or attribute by its name; a file of another name is a subset of that name.

    Args:
        path: the annotation file.

    Returns:
        A value of `SUBSETS`, or the name without its suffix.

    Example:
        >>> subset_name("fgovd/3_attributes.json"), subset_name("mine.json")
        ('easy', 'mine')
    """
    stem = Path(path).stem
    return SUBSETS.get(stem, stem)


def read_regions(path: str | os.PathLike[str]) -> list[Region]:
    """Read an annotation file of FG-OVD.

    Args:
        path: JSON in LVIS style: `category_id` is the right caption, `neg_category_ids` its negatives.

    Returns:
        The regions in the file's order.

    Raises:
        ValueError: no JSON, another layout, an image or caption that is not in the file, an empty box, a number that
            comes twice, a right caption among its own negatives, or no region at all.
        OSError: the file cannot be read.

    Example:
        >>> read_regions("fgovd/3_attributes.json")[0].captions[0]  # doctest: +SKIP
        'A black plastic telephone with red buttons and a dark grey bezel.'

    Source: FG-OVD, arXiv 2311.17518.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        photos = {image["id"]: image for image in content["images"]}
        captions = {category["id"]: category["name"] for category in content["categories"]}
        found = [_region(entry, photos, captions) for entry in content["annotations"]]
    except KeyError as error:
        raise ValueError(f"{path} is no annotation file of FG-OVD: {error} is missing") from error
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is no annotation file of FG-OVD: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no regions: expected annotations with a box, a caption and its negatives")
    if len({region.number for region in found}) < len(found):
        raise ValueError(
            f"{path}: several annotations bear one number (id), so that their ranks could not be told apart"
        )
    return found


def _region(entry: dict[str, Any], photos: dict[int, Any], captions: dict[int, str]) -> Region:
    left, top, width, height = map(float, entry["bbox"])
    if not (width > 0 and height > 0):
        raise ValueError(f"annotation {entry['id']} has an empty box: {entry['bbox']}")
    right, wrong = entry["category_id"], entry["neg_category_ids"]
    if right in wrong:
        raise ValueError(f"annotation {entry['id']} has its right caption among the negatives")
    photo = photos[entry["image_id"]]
    size = (photo["width"], photo["height"]) if {"width", "height"} <= photo.keys() else None
    texts = tuple(captions[number] for number in (right, *wrong))
    return Region(entry["id"], photo["file_name"], (left, top, width, height), texts, size)
