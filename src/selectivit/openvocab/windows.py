"""Maps over a picture that are kept patch by patch and made out row by row, so that no whole one lies in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Rows = Callable[[int, int], Tensor]
"""From a first row and the row after the last to the map's rows, (Q, rows, width)."""

BLOCK_ELEMENTS = 1 << 24
"""Numbers in a block of rows over all queries: 64 MB in float32."""


@dataclass(frozen=True)
class Window:
    """A part of the picture, in pixels.

    Args:
        top: the first row.
        left: the first column.
        height: rows.
        width: columns.
    """

    top: int
    left: int
    height: int
    width: int


def sliding_windows(size: tuple[int, int], window: int | None, stride: int | None) -> list[Window]:
    """The windows that cover a picture; those at the lower and right edges are moved in rather than cut.

    Args:
        size: (height, width) of the picture.
        window: side of the window; None is the whole picture.
        stride: from one window to the next.

    Returns:
        The windows, row by row.

    Example:
        >>> [(w.top, w.left) for w in sliding_windows((224, 336), 224, 112)]
        [(0, 0), (0, 112)]
    """
    height, width = size
    if window is None or stride is None:
        return [Window(0, 0, height, width)]
    tops, lefts = (_starts(side, window, stride) for side in size)
    return [Window(top, left, min(window, height), min(window, width)) for top in tops for left in lefts]


def _starts(side: int, window: int, stride: int) -> list[int]:
    last = max(0, side - window)
    return [*range(0, last, stride), last]


def averaged(parts: Sequence[tuple[Window, Tensor]], width: int) -> Rows:
    """The mean of maps over windows, each scaled up to its window.

    Args:
        parts: windows that together cover the picture, each with its map (Q, h, w).
        width: of the picture in pixels.

    Returns:
        A function that makes out some rows of the picture.
    """
    queries = parts[0][1].shape[0]

    def rows(start: int, stop: int) -> Tensor:
        like = parts[0][1]
        total, count = like.new_zeros(queries, stop - start, width), like.new_zeros(stop - start, width)
        for window, values in parts:
            first, last = max(start, window.top), min(stop, window.top + window.height)
            if first >= last:
                continue
            inside = slice(first - window.top, last - window.top)
            part = _scaled(values, (window.height, window.width), inside.start, inside.stop)
            place = (slice(first - start, last - start), slice(window.left, window.left + window.width))
            total[:, place[0], place[1]] += part
            count[place] += 1
        return total.div_(count)

    return rows


def whole(values: Tensor) -> Rows:
    """Rows of a map that is there already, (Q, H, W)."""
    return lambda start, stop: values[:, start:stop]


def blocks(rows: Rows, size: tuple[int, int], target: tuple[int, int], queries: int) -> Iterator[tuple[slice, Tensor]]:
    """A map scaled to another size (bilinear), a few rows at a time.

    Args:
        rows: makes out rows of the map.
        size: (height, width) of the map.
        target: (height, width) wanted.
        queries: how many maps there are.

    Yields:
        Rows of the target, and the map there, (Q, rows, width).
    """
    height, width = target
    wide = max(width, size[1])
    shrink = max(1.0, size[0] / height)  # rows of the source for one of the target
    step = max(1, int(BLOCK_ELEMENTS / (queries * wide * shrink)))
    for start in range(0, height, step):
        stop = min(height, start + step)
        low, high, _ = _neighbours(size[0], height, start, stop)
        first, last = int(low[0]), int(high[-1]) + 1
        yield slice(start, stop), _scaled(rows(first, last), target, start, stop, of=size[0], first=first)


def _scaled(
    values: Tensor, target: tuple[int, int], start: int, stop: int, *, of: int | None = None, first: int = 0
) -> Tensor:
    """Rows start…stop of (Q, h, w) scaled to the target as `F.interpolate` (bilinear) does.

    The values may be rows from `first` on of a map that has `of` of them.
    """
    height, width = target
    low, high, part = _neighbours(of or values.shape[1], height, start, stop)
    if values.shape[2] != width:  # columns first: there are fewer rows to do it for
        values = F.interpolate(values[None], (values.shape[1], width), mode="bilinear", align_corners=False)[0]
    low, high = (index.to(values.device) - first for index in (low, high))
    if bool((part == 0).all()):
        return values[:, low]
    return torch.lerp(values[:, low], values[:, high], part.to(values).view(1, -1, 1))


def _neighbours(old: int, new: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """For rows of a new size, the two rows of the old one that they lie between, and how near the second is."""
    place = ((torch.arange(start, stop, dtype=torch.float64) + 0.5) * (old / new) - 0.5).clamp_min(0)
    low = place.floor().long().clamp_max(old - 1)
    return low, (low + 1).clamp_max(old - 1), (place - low).clamp(0, 1)
