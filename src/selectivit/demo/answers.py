"""What the page answers: from what was chosen to HTML, a fault of the input told in the picture's place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from selectivit.demo import figures
from selectivit.demo.attending import Attend, feature_maps, look, patch_attention
from selectivit.demo.cores import at_budget
from selectivit.demo.layers import compare_layers
from selectivit.demo.markup import problem
from selectivit.demo.memory import Memory
from selectivit.demo.photo import Limits, Photo, open_photo, rendered_scene
from selectivit.demo.shelf import Shelf
from selectivit.demo.words import chosen_preset, segment, split_labels
from selectivit.models.cache import WeightsError
from selectivit.vis.pixels import picture_png

Place = tuple[float, float]
"""Down and across the photo, 0..1."""

MIDDLE: Place = (0.5, 0.5)
RENDERED = 3
"""Scenes that every page offers beside its photos."""

FOR_PEOPLE = (ValueError, OSError, ImportError, MemoryError, WeightsError)
"""How the library says what was wrong with the input; anything else is a fault of the program."""


def _told(outputs: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put what was wrong with the input into the first of so many outputs, and empty the others."""

    def around(answer: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(answer)
        def safe(*args: Any) -> Any:
            try:
                return answer(*args)
            except FOR_PEOPLE as error:
                text = problem(error)
                return text if outputs == 1 else (text, *[""] * (outputs - 1))

        return safe

    return around


@dataclass(frozen=True)
class Answers:
    """All that the page can be asked; it holds nothing of any visitor.

    Args:
        shelf: of models.
        memory: of results, by content.
        limits: of uploads.
        photos: files that every visitor may take.
    """

    shelf: Shelf
    memory: Memory
    limits: Limits = field(default_factory=Limits)
    photos: tuple[Path, ...] = ()

    def offered(self) -> list[str]:
        """Names of the photos that every visitor may take."""
        return [*(path.name for path in self.photos), *(rendered_scene(i).name for i in range(RENDERED))]

    def offered_photo(self, index: int) -> Photo:
        """One of them.

        Args:
            index: its place in `offered`.

        Returns:
            The photo.

        Raises:
            ImageError: a file that is no picture.
        """
        if not isinstance(index, int) or not 0 <= index < len(self.photos) + RENDERED:  # from a browser: not trusted
            raise ValueError("expected one of the photos that are offered")
        if index < len(self.photos):
            return open_photo(self.photos[index], self.limits)
        return rendered_scene(index - len(self.photos))

    def take(self, photo: Photo, open_it: Callable[[], Photo]) -> tuple[Photo, str]:
        """Take another photo, or stay with the one there is where it cannot be read.

        Args:
            photo: the one there is.
            open_it: gives the other.

        Returns:
            The photo, and what is said of it.
        """
        try:
            photo = open_it()
        except FOR_PEOPLE as error:
            return photo, problem(error) + figures.about_photo(photo)
        return photo, figures.about_photo(photo)

    @_told(3)
    def features(self, photo: Photo, place: Place, model: str, size: int, attend: Attend) -> tuple[str, str, str]:
        """Feature maps, the photo to pick a patch from, and where that patch attends."""
        found = feature_maps(self.shelf, self.memory, photo, model, size, attend)
        plain = look(self.shelf, self.memory, photo, model, size, None)
        picker = figures.picker(picture_png(plain.shown), found, _patch(place, found.grid))
        return figures.wipe(found, attend), picker, self.attention(photo, place, model, size, attend)

    @_told(1)
    def attention(self, photo: Photo, place: Place, model: str, size: int, attend: Attend) -> str:
        """Where the patch at a place attends, with softmax and with the swap."""
        passes = tuple(look(self.shelf, self.memory, photo, model, size, rule) for rule in (None, attend))
        patch = _patch(place, (passes[0].map.shape[1], passes[0].map.shape[2]))
        shape = (passes[0].shown.shape[0], passes[0].shown.shape[1])
        return figures.looked(("softmax", attend.title), patch_attention(passes, patch), shape, patch)

    @_told(1)
    def segmentation(
        self, photo: Photo, clip: str, labels: str, preset: str, alpha: float | Literal["auto"] | None
    ) -> str:
        """The photo under the classes of typed words."""
        chosen = chosen_preset(preset, alpha)
        words = split_labels(labels)
        return figures.segmented(segment(self.shelf, self.memory, photo, clip, words, chosen, preset))

    @_told(1)
    def budget(self, photo: Photo, model: str, size: int, cores: int) -> str:
        """Features, cores and cost at a budget."""
        return figures.budgeted(at_budget(self.shelf, self.memory, photo, model, size, cores))

    @_told(1)
    def layers(self, photo: Photo, model: str, size: int, attend: Attend) -> str:
        """Curves over the layers."""
        return figures.layered(compare_layers(self.shelf, self.memory, photo, model, size, attend))


def place_of(row: Any, column: Any, rows: Any, columns: Any) -> Place:
    """Where in the photo a patch is.

    Args:
        row: of the patch, from a browser: not trusted.
        column: of the patch.
        rows: of the grid that was clicked.
        columns: of it.

    Returns:
        Down and across, 0..1; the middle where the numbers are none.

    Example:
        >>> place_of(0, 3, 2, 4), place_of("x", None, 2, 4)
        ((0.25, 0.875), (0.5, 0.5))
    """
    try:
        down, across = ((int(at) + 0.5) / int(of) for at, of in ((row, rows), (column, columns)))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        return MIDDLE
    return (down, across) if 0 <= down < 1 and 0 <= across < 1 else MIDDLE


def _patch(place: Place, grid: tuple[int, int]) -> tuple[int, int]:
    return int(place[0] * grid[0]), int(place[1] * grid[1])
