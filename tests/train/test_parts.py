"""Losses, budgets, schedules and batches: functions of the seed and the step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from selectivit.train.budget import BudgetDraw, published_draw
from selectivit.train.loader import StepBatches
from selectivit.train.losses import LossWeights, distillation_losses
from selectivit.train.schedule import OBJECTS365, PRESETS, Mix, Schedule, Stage
from selectivit.train.settings import DistillSettings, Running
from selectivit.train.tokens import DenseTokens, to_grid


def tokens(seed, grid=(2, 3), width=5, requires_grad=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(2, width, generator=generator).to(dtype).requires_grad_(requires_grad)
    patches = torch.randn(2, grid[0] * grid[1], width, generator=generator).to(dtype).requires_grad_(requires_grad)
    return DenseTokens(whole, patches, grid)


def test_losses_are_the_formulas():
    a, b = tokens(0), tokens(1)
    found = distillation_losses(a, b, LossWeights(2.0, 3.0, 5.0))
    whole = 1 - (F.normalize(a.global_token, dim=-1) * F.normalize(b.global_token, dim=-1)).sum(-1).mean()
    patch = 1 - (F.normalize(a.patch_tokens, dim=-1) * F.normalize(b.patch_tokens, dim=-1)).sum(-1).mean()
    square = (a.patch_tokens - b.patch_tokens).square().mean()
    torch.testing.assert_close(found["global_cosine"], whole)
    torch.testing.assert_close(found["patch_cosine"], patch)
    torch.testing.assert_close(found["patch_mse"], square)
    torch.testing.assert_close(found["loss"], 2 * whole + 3 * patch + 5 * square)


def test_losses_are_float32_under_autocast_and_leave_the_teacher_alone():
    a, b = tokens(0, requires_grad=True, dtype=torch.bfloat16), tokens(1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = distillation_losses(a, b, LossWeights())
    assert all(value.dtype == torch.float32 for value in found.values())
    found["loss"].backward()
    assert a.patch_tokens.grad is not None and b.patch_tokens.grad is None


def test_losses_refuse_shapes_that_differ_and_weights_that_mean_nothing():
    with pytest.raises(ValueError, match="equal shapes"):
        distillation_losses(tokens(0), tokens(1, width=4), LossWeights())
    for weights in ((-1, 1, 1), (0, 0, 0)):
        with pytest.raises(ValueError, match="weights of losses"):
            LossWeights(*weights)


def test_grids_are_refused_or_interpolated():
    with pytest.raises(ValueError, match="2 x 3 patches, the student's 4 x 6"):
        to_grid(tokens(0), (4, 6), "refuse")
    constant = DenseTokens(torch.ones(1, 3), torch.full((1, 6, 3), 2.0), (2, 3))
    found = to_grid(constant, (4, 6), "interpolate")
    assert found.grid == (4, 6) and torch.equal(found.patch_tokens, torch.full((1, 24, 3), 2.0))
    assert to_grid(constant, (2, 3), "refuse") is constant


def test_the_papers_budgets_come_as_often_as_it_says():
    draw = published_draw(64)
    counts = Counter(draw.at(step, seed=0) for step in range(4000))
    for budget, weight in zip(range(8, 65, 8), (1, 1, 2, 2, 3, 3, 4, 4), strict=True):
        assert abs(counts[budget] / 4000 - weight / 20) < 0.03
    assert [draw.at(step, seed=0) for step in range(50)] != [draw.at(step, seed=1) for step in range(50)]


@given(st.integers(1, 200))
def test_budgets_of_any_bank_are_inside_it(num_cores):
    draw = published_draw(num_cores)
    assert min(draw.budgets) >= 1 and max(draw.budgets) == num_cores and sum(draw.weights) == 20
    assert len(set(draw.budgets)) == len(draw.budgets)


@pytest.mark.parametrize("given", [((), ()), ((8,), (1, 2)), ((0,), (1,)), ((8,), (0,))])
def test_budgets_that_cannot_be_drawn(given):
    with pytest.raises(ValueError, match="budgets"):
        BudgetDraw(*given)


def test_the_papers_schedule():
    stage = OBJECTS365.stages[0].steps
    assert OBJECTS365.rate(56_699) == 4e-4 and OBJECTS365.rate(0) == pytest.approx(4e-4 / 56_700)
    assert OBJECTS365.rate(stage - 1) == pytest.approx(5e-5, rel=1e-3)
    assert OBJECTS365.rate(stage + 6_999) == 8e-5 and OBJECTS365.rate(OBJECTS365.steps - 1) == pytest.approx(
        3e-5, rel=1e-3
    )
    assert {OBJECTS365.size(step, 0) for step in range(0, stage, 9999)} == {256}
    first = Counter(OBJECTS365.size(stage + step, 0) for step in range(2000))
    assert set(first) == {256, 384, 512} and abs(first[512] / 2000 - 0.30) < 0.04
    later = Counter(OBJECTS365.size(stage + 7_000 + step, 0) for step in range(2000))
    assert set(later) == {256, 384, 512, 768} and abs(later[256] / 2000 - 0.15) < 0.03


@given(st.sampled_from(sorted(PRESETS)), st.integers(3, 5000))
def test_a_schedule_can_be_stretched_to_any_number_of_steps(name, steps):
    schedule = PRESETS[name].scaled(steps)
    assert schedule.steps == steps
    assert all(mix.steps >= 1 for stage in schedule.stages for mix in stage.mixes)
    assert all(schedule.rate(step) > 0 for step in (0, steps // 2, steps - 1))


def test_too_few_steps_and_steps_outside():
    with pytest.raises(ValueError, match="3 steps or more"):
        OBJECTS365.scaled(2)
    with pytest.raises(ValueError, match="expected a step of 0 to 9"):
        Schedule((Stage((Mix(10, {14: 1.0}),), 1.0, 0.0, 0),)).rate(10)


def test_sizes_become_whole_patches():
    assert OBJECTS365.at_sizes(14).sizes == (252, 378, 518, 770)
    assert PRESETS["small"].at_sizes(14).sizes == PRESETS["small"].at_sizes(16).sizes == (112, 224)


@given(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3)]), st.integers(0, 4))
def test_ranks_and_parts_split_a_steps_samples(split, start):
    world, parts = split
    schedule = Schedule((Stage((Mix(5, {14: 1.0, 28: 1.0}),), 1.0, 0.0, 0),))
    found = {}
    for rank in range(world):
        batches = StepBatches(schedule, 12, parts, rank, world, seed=3, start=start)
        assert len(batches) == 5 * parts
        for place, batch in enumerate(batches):
            step, part = start + place // parts, place % parts
            assert batches.first(step, part) == batch[0].number
            assert {sample.size for sample in batch} == {schedule.size(step, 3)}
            found.setdefault(step, []).extend(sample.number for sample in batch)
    assert found.keys() == set(range(start, 5))
    assert all(sorted(numbers) == list(range(step * 12, step * 12 + 12)) for step, numbers in found.items())


def test_a_batch_that_cannot_be_split():
    with pytest.raises(ValueError, match="2 processes and 2 parts divide evenly, got 6"):
        StepBatches(PRESETS["small"], 6, 2, 0, 2, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": "large"},
        {"grid": "crop"},
        {"optimizer": "sgd"},
        {"precision": "fp16"},
        {"steps": 0},
        {"batch_size": 0},
        {"lr": -1.0},
        {"weight_decay": -0.1},
        {"validate_every": 0},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        DistillSettings(**wrong)
    with pytest.raises(ValueError, match="expected checkpoint_every"):
        Running(checkpoint_every=0)
