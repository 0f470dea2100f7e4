"""The budget of each training step: drawn from the seed and the step, so that all ranks and a resumed run agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selectivit.data.seeding import derived_seed


@dataclass(frozen=True)
class BudgetDraw:
    """Numbers of active cores, and how often each is drawn.

    Args:
        budgets: each 1 or more.
        weights: as many, above 0; need not sum to 1.

    Raises:
        ValueError: none, lengths that differ, a budget below 1, or a weight that is not positive.

    Example:
        >>> draw = BudgetDraw((8, 16), (1, 3))
        >>> draw.at(step=5, seed=0) == draw.at(step=5, seed=0)
        True

    Source: VECA, arXiv 2605.12491.
    """

    budgets: Sequence[int]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        if not self.budgets or len(self.budgets) != len(self.weights):
            raise ValueError(f"expected as many weights as budgets, got {self.weights} for {self.budgets}")
        if min(self.budgets) < 1 or min(self.weights) <= 0:
            raise ValueError(f"expected budgets of 1 or more with weights above 0, got {self.budgets}, {self.weights}")

    def at(self, step: int, seed: int) -> int:
        """The budget of a step.

        Args:
            step: optimiser step, from 0.
            seed: the run's.

        Returns:
            One of `budgets`.
        """
        chances = np.asarray(self.weights, dtype=np.float64)
        generator = np.random.default_rng(derived_seed(seed, "budget", step))
        return int(self.budgets[generator.choice(len(chances), p=chances / chances.sum())])


def published_draw(num_cores: int) -> BudgetDraw:
    """The paper's draw: eighths of the bank, the larger the more often, (1, 1, 2, 2, 3, 3, 4, 4) in 20.

    Args:
        num_cores: size of the bank.

    Returns:
        {8, 16, …, 64} for a bank of 64. Banks of fewer than 8 cores have fewer budgets; equal ones are joined.

    Raises:
        ValueError: an empty bank.

    Example:
        >>> published_draw(64).budgets
        (8, 16, 24, 32, 40, 48, 56, 64)
        >>> published_draw(4)
        BudgetDraw(budgets=(1, 2, 3, 4), weights=(2, 4, 6, 8))

    Source: VECA, arXiv 2605.12491.
    """
    joined: dict[int, int] = {}
    for eighth, weight in enumerate((1, 1, 2, 2, 3, 3, 4, 4), start=1):
        budget = -(-num_cores * eighth // 8)
        joined[budget] = joined.get(budget, 0) + weight
    return BudgetDraw(tuple(joined), tuple(joined.values()))
