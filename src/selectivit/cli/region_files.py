"""The annotation files of FG-OVD that a job was given, and their regions sorted by photo and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectivit.openvocab.regions import Region


@dataclass(frozen=True)
class Subset:
    """One annotation file.

    Args:
        name: its difficulty or attribute.
        path: the file.
        regions: what it holds.
    """

    name: str
    path: Path
    regions: tuple[Region, ...]


def read_subsets(annotations: Sequence[str]) -> list[Subset]:
    """Read the annotation files.

    Args:
        annotations: JSON files, and folders that hold some.

    Returns:
        One subset a file, in the benchmark's order.

    Raises:
        ValueError: none, one that is not there or damaged, or two of one name.
    """
    from selectivit.openvocab.regions import SUBSETS, read_regions, subset_name

    paths = [
        path
        for given in map(Path, annotations)
        for path in (sorted(given.glob("*.json")) if given.is_dir() else [given])
    ]
    if not paths:
        raise ValueError(
            f"no annotation file in {', '.join(annotations)}: expected JSON files such as 1_attributes.json"
        )
    order = list(SUBSETS.values())
    names = [subset_name(path) for path in paths]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"several files are called {twice!r}: rename one, the results bear the files' names")
    known = {name: order.index(name) if name in order else len(order) for name in names}
    some = [Subset(name, path, tuple(read_regions(path))) for name, path in zip(names, paths, strict=True)]
    return sorted(some, key=lambda subset: (known[subset.name], subset.name))


def photos_of(subsets: Sequence[Subset]) -> dict[str, list[Region]]:
    """Sort all regions of all subsets by photo, so that each photo passes the model once.

    Args:
        subsets: of any files.

    Returns:
        The regions of each photo, one subset after the other.
    """
    from selectivit.openvocab.region_ranking import by_photo

    return by_photo(region for subset in subsets for region in subset.regions)


def ranks_by_subset(subsets: Sequence[Subset], found: dict[str, list[int]]) -> dict[str, dict[int, int]]:
    """Give the ranks back to the subsets.

    Args:
        subsets: in the order that `photos_of` had them.
        found: ranks by photo, of its regions in the order of `photos_of`.

    Returns:
        By subset the rank of each region that has one, by its number.
    """
    result: dict[str, dict[int, int]] = {}
    left = {name: iter(ranked) for name, ranked in found.items()}
    for subset in subsets:
        here = [region for region in subset.regions if region.photo in left]
        result[subset.name] = {region.number: next(left[region.photo]) for region in here}
    return result
