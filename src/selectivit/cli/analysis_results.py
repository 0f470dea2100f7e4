"""What an analysis measures, and what it found photo by photo, in one process or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from selectivit.cli.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from selectivit.eval.diffuseness import Diffuseness
    from selectivit.ops.selective import AttentionRule

Counts = list[list[int]]
"""A confusion matrix as pairs of place and count, since most of it is 0."""


@dataclass(frozen=True)
class Spread:
    """What to measure of a model's attention.

    Args:
        rules: by which weights are made.
        layers: as `swap_attention` takes them.
        size: the photos' shorter side in pixels; None is the size the model was made for.
    """

    rules: Sequence[AttentionRule]
    layers: int | Sequence[int] | None
    size: int | None


@dataclass
class Study:
    """What was found, photo by photo.

    Args:
        counts: by cell's number and photo's number.
        spread: by model and photo's number.
        skipped: photo's number -> why it is left out, of all cells alike.
    """

    counts: dict[int, dict[int, Counts]] = field(default_factory=dict)
    spread: dict[str, dict[int, Diffuseness]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)

    def merged(self, ranks: Ranks) -> Study:
        """Put the processes' parts together; each waits here for the others.

        Args:
            ranks: the processes.

        Returns:
            The whole, the same in every process; photos that were skipped once are in no part of it.
        """
        whole = Study()
        parts = ranks.gather(self)
        for part in parts:
            whole.skipped |= part.skipped
        for part in parts:
            for name in ("counts", "spread"):
                for key, some in getattr(part, name).items():
                    kept = {place: value for place, value in some.items() if place not in whole.skipped}
                    getattr(whole, name).setdefault(key, {}).update(kept)
        return whole

    def confusion(self, cell: int, classes: int) -> Tensor:
        """Sum a cell's counts over the photos.

        Args:
            cell: its number.
            classes: K.

        Returns:
            (K, K) int64, rows the true classes.
        """
        import torch

        total = torch.zeros(classes * classes, dtype=torch.int64)
        for pairs in self.counts.get(cell, {}).values():
            for place, count in pairs:
                total[place] += count
        return total.view(classes, classes)

    def diffuseness(self, model: str) -> Diffuseness:
        """Sum a model's measures over the photos."""
        first, *others = (value for _, value in sorted(self.spread[model].items()))
        for other in others:
            first = first + other
        return first
