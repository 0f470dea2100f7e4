"""Names for the outputs of many photos: each after its photo, no two alike."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path


def name_outputs(sources: Sequence[tuple[Path, Path]]) -> list[str]:
    """Name each photo's outputs after it, keeping sub-folders.

    A photo is named by its path below the folder it was found in, without the suffix. Photos that would get the same
    name keep the suffix, and if that is not enough, as many of their parent folders as are needed. Names that differ
    by case alone count as the same, for file systems that think so.

    Args:
        sources: for each photo, the folder it was found in (its own for a photo given by name) and its path.

    Returns:
        Relative paths without a suffix, in the order of the sources.

    Example:
        >>> folder = Path("/photos")
        >>> name_outputs([(folder, folder / "a.jpg"), (folder, folder / "b/c.jpg"), (folder, folder / "b/c.png")])
        ['a', 'b/c.jpg', 'b/c.png']
    """
    candidates = [_candidates(root, path) for root, path in sources]
    level = [0] * len(sources)
    while True:
        names = [options[i] for options, i in zip(candidates, level, strict=True)]
        counts = Counter(name.casefold() for name in names)
        grow = [i for i, name in enumerate(names) if counts[name.casefold()] > 1 and level[i] + 1 < len(candidates[i])]
        if not grow:
            return _number(names)
        for i in grow:
            level[i] += 1


def _candidates(root: Path, path: Path) -> list[str]:
    """List a photo's possible names, from the shortest to its whole path."""
    root, path = Path(os.path.abspath(root)), Path(os.path.abspath(path))
    inside = path.relative_to(root)
    names = [inside.with_suffix("").as_posix(), inside.as_posix()]
    parents = [part for part in root.parts if part != root.anchor]
    for i in range(len(parents) - 1, -1, -1):
        names.append("/".join([*parents[i:], inside.as_posix()]))
    return names


def _number(names: list[str]) -> list[str]:
    """Tell apart by a number what even whole paths do not: names that differ by case alone."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name.casefold()] += 1
        count = seen[name.casefold()]
        result.append(name if count == 1 else f"{name}~{count}")
    return result


def beside_others(names: Sequence[str], is_others: Callable[[int, str], bool]) -> list[str]:
    """Number the names under which a folder already holds what belongs to other photos.

    Args:
        names: from `name_outputs`.
        is_others: whether the outputs of the i-th photo under a name would replace another photo's.

    Returns:
        Names under which nothing is lost, in the same order.

    Example:
        >>> beside_others(["a", "b"], lambda i, name: name == "a")
        ['a~2', 'b']
    """
    used = {name.casefold() for name in names}
    result = []
    for i, name in enumerate(names):
        free, count = name, 1
        while is_others(i, free) or (count > 1 and free.casefold() in used):
            count += 1
            free = f"{name}~{count}"
        used.add(free.casefold())
        result.append(free)
    return result
