"""A box around an object, and what one annotation file says of one picture."""

from __future__ import annotations

from dataclasses import dataclass

from selectivit.data.images import ImageError


class BoxError(ImageError):
    """Boxes that cannot be used; the text names the file, says what was expected and what to do."""


@dataclass(frozen=True)
class Box:
    """A box in a picture's pixels; its right and lower edges lie outside it.

    Args:
        label: what is in it.
        left: edge, from the picture's left edge, pixels.
        top: edge, from the picture's upper edge.
        right: edge, from the picture's left edge.
        bottom: edge, from the picture's upper edge.
    """

    label: str
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class Annotated:
    """What is known of one picture.

    Args:
        boxes: as they were given.
        size: (width, height) of the picture that they are for, or None where that is not told.
        source: the file, for errors.
    """

    boxes: tuple[Box, ...]
    size: tuple[int, int] | None
    source: str
