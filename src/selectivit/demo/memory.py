"""What the page remembers: results by what they depend on, as many as fit, each computed once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class Memory:
    """Results by key, the least lately used forgotten first; safe for threads.

    A key holds all that a result depends on, the photo's content among it, so no visitor is given another's.

    Args:
        megabytes: of tensors and bytes kept at once. A result that is larger alone is given, but not kept.

    Example:
        >>> memory = Memory(1)
        >>> memory.get("a", lambda: 3), memory.get("a", lambda: 4)
        (3, 3)
    """

    def __init__(self, megabytes: float):
        self._bound, self._held = megabytes * 1e6, 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Give the result of a key.

        Args:
            key: all that it depends on.
            compute: called where it is not kept. Two threads that ask at once may both compute: the result is the
                same.

        Returns:
            The result, shared: not to be changed.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        result = compute()
        size = held_bytes(result)
        with self._lock:
            if key not in self._kept and size <= self._bound:
                self._kept[key] = (result, size)
                self._held += size
            while self._held > self._bound:
                self._held -= self._kept.popitem(last=False)[1][1]
        return result

    def __len__(self) -> int:
        return len(self._kept)


def held_bytes(thing: Any) -> int:
    """Count the bytes of the tensors, bytes and text in a result.

    Args:
        thing: nested dataclasses, mappings and sequences.

    Returns:
        The number.

    Example:
        >>> held_bytes({"a": [b"123", "4"]})
        4
    """
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, (bytes, str)):
        return len(thing)
    if isinstance(thing, Mapping):
        return sum(map(held_bytes, thing.values()))
    if is_dataclass(thing):
        return sum(held_bytes(getattr(thing, field.name)) for field in fields(thing))
    return sum(map(held_bytes, thing)) if isinstance(thing, Iterable) else 0
