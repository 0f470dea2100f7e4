"""Which budget is recommended, and that times are taken in turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selectivit.eval.budget import BudgetPoint, median_times, recommend

POINTS = [
    BudgetPoint(cores, cosine, 0.9, gflops=cores / 8, ms=float(cores))
    for cores, cosine in ((1, 0.70), (8, 0.80), (16, 0.84), (32, 0.845), (64, 0.844))
]


def test_limits_are_kept_and_the_closest_taken():
    assert recommend(POINTS).num_cores == 16
    assert recommend(POINTS, max_ms=100).num_cores == 32
    assert recommend(POINTS, max_ms=31.9).num_cores == 16
    assert recommend(POINTS, max_ms=100, max_gflops=1.0).num_cores == 8
    assert recommend(POINTS, max_ms=0.5) is None
    with pytest.raises(ValueError, match="at least one budget"):
        recommend([])


def test_of_equals_the_cheapest_is_taken():
    points = [BudgetPoint(cores, 0.8, 0.9, 1.0, 1.0) for cores in (64, 8, 16)]
    assert recommend(points).num_cores == recommend(points, max_ms=2).num_cores == 8


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 9)), min_size=1, max_size=8), st.floats(0.1, 9))
def test_nothing_within_the_limit_is_better(found, limit):
    points = [BudgetPoint(i + 1, cosine, 0.0, 1.0, ms) for i, (cosine, ms) in enumerate(found)]
    chosen = recommend(points, max_ms=limit)
    within = [point for point in points if point.ms <= limit]
    assert (chosen is None) == (not within)
    assert chosen is None or (chosen in within and all(chosen.patch_cosine >= p.patch_cosine for p in within))


def test_forwards_take_turns_and_the_first_round_is_not_counted():
    calls = []
    times = median_times([lambda: calls.append("a"), lambda: calls.append("b")], repeats=2)
    assert calls == ["a", "b"] * 3 and len(times) == 2 and min(times) >= 0
    with pytest.raises(ValueError, match="one repeat"):
        median_times([], repeats=0)
