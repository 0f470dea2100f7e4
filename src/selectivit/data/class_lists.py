"""Class lists of the standard data sets: their names, and the words that stand for them, from files beside this one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

VOID_NAMES = frozenset(("void", "unlabeled", "unlabelled", "ignore", "ignored"))
"""Names that, in a folder's own classes.json, stand for pixels that no score counts."""


class ClassListError(ValueError):
    """A list of classes that cannot be used; the text says why."""


@dataclass(frozen=True)
class ClassList:
    """The classes of a data set in the order of their indices.

    Args:
        title: of the data set.
        names: of the classes; "background", where there is one, is the first.
        words: for each class the words by which it is looked for; mostly its name alone.
        source: where names and words come from.
    """

    title: str
    names: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    source: str

    def foreground(self) -> ClassList:
        """The same classes without the first, background."""
        return ClassList(self.title, self.names[1:], self.words[1:], self.source)


@cache
def standard_classes(name: str) -> ClassList:
    """A class list that comes with the package.

    Args:
        name: voc, context, ade20k, coco_object, coco_stuff or cityscapes.

    Returns:
        The list, with background where the data set has it.

    Example:
        >>> voc = standard_classes("voc")
        >>> len(voc.names), voc.names[4], voc.words[4]
        (21, 'boat', ('ship',))
    """
    text = files("selectivit.data").joinpath("classes", f"{name}.json").read_text(encoding="utf-8")
    content: Mapping[str, Any] = json.loads(text)
    names = tuple(name for name, *_ in content["classes"])
    words = tuple(tuple(words) or (name,) for name, *words in content["classes"])
    return ClassList(content["title"], names, words, content["source"])


def own_classes(path: Path) -> tuple[dict[int, str], frozenset[int]]:
    """Read a folder's classes.json.

    Args:
        path: the file: an object from the masks' ids to names, {"0": "sky", "11": "void"}, or a list of names.

    Returns:
        Names by id, and the ids of void pixels: those named void, unlabeled or ignore.

    Raises:
        ClassListError: not JSON, no names, a name that comes twice, or an id that no mask can hold.
    """
    wanted = f'{path}: expected ids and names such as {{"0": "sky", "1": "road", "255": "void"}}, or a list of names'
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ClassListError(f"{wanted}; it cannot be read ({error})") from None
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    try:
        found = {int(key): str(name).strip() for key, name in pairs if isinstance(name, str) and name.strip()}
    except ValueError as error:
        raise ClassListError(f"{wanted}; {error}") from None
    if not found or len(found) != len(content):
        raise ClassListError(f"{wanted}; got {str(content)[:80]}")
    if min(found) < 0 or max(found) > 65535:
        raise ClassListError(f"{path}: ids are 0 to 65535, got {min(found)} to {max(found)}")
    void = frozenset(key for key, name in found.items() if name.casefold() in VOID_NAMES)
    names = {key: found[key] for key in sorted(found) if key not in void}
    folded = [name.casefold() for name in names.values()]
    twice = sorted({name for name in folded if folded.count(name) > 1})
    if twice or not names:
        reason = f"{', '.join(twice)} came more than once" if twice else "all of it is void"
        raise ClassListError(f"{path}: classes must have different names: {reason}")
    return names, void
