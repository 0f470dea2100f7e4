"""The models of the page: loaded by name when asked for, a few kept, each used by one thread at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selectivit.models.names import EMBEDDED
from selectivit.models.weights import load_model

CLIP_CONFIG = "open_clip_config.json"


class NotOfferedError(ValueError):
    """A name that this page does not load."""


class Shelf:
    """Models by name.

    Args:
        offered: names that may always be loaded, beside those that come with the package.
        any_name: whether visitors may name any model or folder; a page that strangers reach should not.
        device: where models are put.
        kept: how many stay loaded; the one unused for longest goes first.

    Example:
        >>> shelf = Shelf(["dinov2-small"], any_name=False)
        >>> shelf.check("/etc")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        selectivit.demo.shelf.NotOfferedError: this page does not load '/etc'; it offers: ...
    """

    def __init__(self, offered: list[str], *, any_name: bool = True, device: str = "cpu", kept: int = 3):
        self.offered = list(dict.fromkeys([*offered, *EMBEDDED]))
        self.any_name, self.device, self._count = any_name, device, kept
        self._kept: OrderedDict[tuple[str, str], tuple[Any, threading.Lock]] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def check(self, name: str) -> str:
        """Tell whether a visitor may have a model.

        Args:
            name: as it was typed.

        Returns:
            The name without spaces around it.

        Raises:
            NotOfferedError: the page is open to others and does not offer this one.
        """
        name = (name or "").strip()
        if not self.any_name and name not in self.offered:
            raise NotOfferedError(f"this page does not load {name!r}; it offers: {', '.join(self.offered)}")
        return name

    @contextmanager
    def model(self, name: str) -> Iterator[Any]:
        """Use a model alone: a swap changes it while it lasts.

        Args:
            name: what `load_model` takes.

        Yields:
            The model, in eval mode.

        Raises:
            NotOfferedError: see `check`.
            ValueError: an unknown name.
            WeightsError: weights that cannot be had.
        """
        with self._use("model", name, lambda: load_model(name, device=self.device)) as model:
            yield model

    @contextmanager
    def clip(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Use a CLIP and its tokenizer alone.

        Args:
            name: what `load_clip` takes.

        Yields:
            (model, tokenizer).

        Raises:
            NotOfferedError: see `check`.
            ValueError: an unknown name.
            WeightsError: weights that cannot be had.
        """
        from selectivit.models.clip import load_clip

        with self._use("clip", name, lambda: load_clip(name, device=self.device)) as pair:
            yield pair

    @contextmanager
    def _use(self, kind: str, name: str, load: Callable[[], Any]) -> Iterator[Any]:
        self.check(name)
        found = self._find((kind, name))
        if found is None:
            with self._loading:  # one at a time: two visitors who ask for the same wait for one load
                found = self._find((kind, name))
                if found is None:
                    found = self._put((kind, name), load())
        thing, lock = found
        with lock:
            yield thing

    def _find(self, key: tuple[str, str]) -> tuple[Any, threading.Lock] | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _put(self, key: tuple[str, str], thing: Any) -> tuple[Any, threading.Lock]:
        with self._lock:
            self._kept[key] = (thing, threading.Lock())
            while len(self._kept) > self._count:
                self._kept.popitem(last=False)  # who is using it goes on with it
            return self._kept[key]


def embedded_clips() -> list[str]:
    """The models that come with the package and know words.

    Returns:
        Their names, as `load_clip` takes them; there may be none.

    Example:
        >>> all(name in EMBEDDED for name in embedded_clips())
        True
    """
    return [name for name, folder in EMBEDDED.items() if (folder / CLIP_CONFIG).is_file()]
