"""What each budget of cores costs and gives, and which to take under a limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

NEAR = 0.01
"""Without a limit the smallest budget is taken whose patch cosine is this near to the best one's."""


@dataclass(frozen=True)
class BudgetPoint:
    """One budget.

    Args:
        num_cores: active cores.
        patch_cosine: mean cosine of the student's patches to the teacher's.
        global_cosine: that of the global tokens.
        gflops: of one image, by formula; a product with its sum counts as two.
        ms: median time of one forward, milliseconds.
    """

    num_cores: int
    patch_cosine: float
    global_cosine: float
    gflops: float
    ms: float


def recommend(
    points: Sequence[BudgetPoint], *, max_ms: float | None = None, max_gflops: float | None = None
) -> BudgetPoint | None:
    """Choose a budget.

    Args:
        points: one or more.
        max_ms: bound on the time of a forward, milliseconds.
        max_gflops: bound on an image's GFLOPs.

    Returns:
        Under a limit, the point of the best patch cosine that keeps it, of equals the cheapest, or None where none
        does. Without a limit, the smallest budget within `NEAR` of the best patch cosine.

    Raises:
        ValueError: no points.

    Example:
        >>> points = [BudgetPoint(8, 0.80, 0.8, 1.0, 5.0), BudgetPoint(64, 0.85, 0.9, 2.0, 9.0)]
        >>> recommend(points, max_ms=6).num_cores, recommend(points).num_cores, recommend(points, max_gflops=0.1)
        (8, 64, None)
    """
    if not points:
        raise ValueError("expected at least one budget to choose from")
    if max_ms is None and max_gflops is None:
        best = max(point.patch_cosine for point in points)
        return min((p for p in points if p.patch_cosine >= best - NEAR), key=lambda point: point.num_cores)
    within = [
        point
        for point in points
        if (max_ms is None or point.ms <= max_ms) and (max_gflops is None or point.gflops <= max_gflops)
    ]
    return max(within, key=lambda point: (point.patch_cosine, -point.num_cores), default=None)


def median_times(forwards: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Time several forwards in turns, so that what else the machine does falls on all alike.

    Args:
        forwards: each called once before, to warm up.
        repeats: rounds.

    Returns:
        The median of each, milliseconds.

    Raises:
        ValueError: no rounds.

    Example:
        >>> len(median_times([lambda: None, lambda: None], repeats=3))
        2
    """
    if repeats < 1:
        raise ValueError(f"expected one repeat or more, got {repeats}")
    taken: list[list[float]] = [[] for _ in forwards]
    for turn in range(repeats + 1):
        for forward, times in zip(forwards, taken, strict=True):
            _wait()
            start = time.perf_counter()
            forward()
            _wait()
            if turn:
                times.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(times) for times in taken]


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
