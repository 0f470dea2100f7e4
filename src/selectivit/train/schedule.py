"""Learning rate and image size of each step: stages, each a cosine with a warm-up over its own mix of sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from selectivit.data.seeding import derived_seed


@dataclass(frozen=True)
class Mix:
    """Image sizes for some steps.

    Args:
        steps: how long.
        sizes: side of the crop in pixels -> how often it is drawn; need not sum to 1.
    """

    steps: int
    sizes: Mapping[int, float]


@dataclass(frozen=True)
class Stage:
    """Some mixes under one cosine.

    Args:
        mixes: one after the other.
        lr: at the end of the warm-up.
        min_lr: at the end.
        warmup: steps over which the rate rises in a straight line.
    """

    mixes: tuple[Mix, ...]
    lr: float
    min_lr: float
    warmup: int

    @property
    def steps(self) -> int:
        """How many steps the stage has."""
        return sum(mix.steps for mix in self.mixes)

    def rate(self, step: int) -> float:
        """The learning rate at a step of this stage, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        part = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True)
class Schedule:
    """Stages one after the other.

    Args:
        stages: at least one; each at least one step.

    Raises:
        ValueError: no stage, or one without steps.

    Example:
        >>> schedule = Schedule((Stage((Mix(10, {224: 1.0}),), lr=1.0, min_lr=0.0, warmup=2),))
        >>> schedule.steps, schedule.rate(0), schedule.rate(2), schedule.size(3, seed=0)
        (10, 0.5, 1.0, 224)
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages or min(stage.steps for stage in self.stages) < 1:
            raise ValueError("expected a schedule of stages of one step or more")

    @property
    def steps(self) -> int:
        """How many steps there are in all."""
        return sum(stage.steps for stage in self.stages)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All image sizes that may be drawn."""
        return tuple(sorted({size for stage in self.stages for mix in stage.mixes for size in mix.sizes}))

    @property
    def last_size(self) -> int:
        """The image size that is most frequent at the end; of several the smallest."""
        sizes = self.stages[-1].mixes[-1].sizes
        return min(sizes, key=lambda size: (-sizes[size], size))

    def rate(self, step: int) -> float:
        """The learning rate at a step, from 0."""
        stage, place = self._stage(step)
        return stage.rate(place)

    def size(self, step: int, seed: int) -> int:
        """The image size at a step: drawn from the seed and the step, the same in every process."""
        stage, place = self._stage(step)
        for mix in stage.mixes:
            if place < mix.steps:
                sizes, weights = list(mix.sizes), np.fromiter(mix.sizes.values(), dtype=np.float64)
                generator = np.random.default_rng(derived_seed(seed, "size", step))
                return int(sizes[generator.choice(len(sizes), p=weights / weights.sum())])
            place -= mix.steps
        raise AssertionError("a stage's steps are those of its mixes")

    def _stage(self, step: int) -> tuple[Stage, int]:
        if not 0 <= step < self.steps:
            raise ValueError(f"expected a step of 0 to {self.steps - 1}, got {step}")
        for stage in self.stages:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        raise AssertionError("the step was checked")

    def scaled(self, steps: int) -> Schedule:
        """The same shape in another number of steps, at least one a mix.

        Args:
            steps: in all.

        Returns:
            The schedule.

        Raises:
            ValueError: fewer steps than mixes.
        """
        old = [mix.steps for stage in self.stages for mix in stage.mixes]
        if steps < len(old):
            raise ValueError(f"expected {len(old)} steps or more, one for each mix of sizes, got {steps}")
        total = sum(old)
        ends = [round(steps * sum(old[: i + 1]) / total) for i in range(len(old))]
        for i in range(len(ends)):  # none empty, and the last ends where it must
            ends[i] = min(max(ends[i], i + 1), steps - (len(ends) - 1 - i))
        lengths = iter(end - start for start, end in zip([0, *ends], ends, strict=False))
        stages = []
        for stage in self.stages:
            mixes = tuple(replace(mix, steps=next(lengths)) for mix in stage.mixes)
            stages.append(replace(stage, mixes=mixes, warmup=round(stage.warmup * steps / total)))
        return Schedule(tuple(stages))

    def at_rate(self, lr: float) -> Schedule:
        """All rates multiplied so that the first stage's peak is `lr`."""
        factor = lr / self.stages[0].lr
        stages = (replace(stage, lr=stage.lr * factor, min_lr=stage.min_lr * factor) for stage in self.stages)
        return Schedule(tuple(stages))

    def at_sizes(self, patch_size: int) -> Schedule:
        """All sizes rounded to whole patches."""

        def whole(mix: Mix) -> Mix:
            sizes: dict[int, float] = {}
            for size, weight in mix.sizes.items():
                near = max(1, round(size / patch_size)) * patch_size
                sizes[near] = sizes.get(near, 0.0) + weight
            return replace(mix, sizes=sizes)

        return Schedule(tuple(replace(stage, mixes=tuple(map(whole, stage.mixes))) for stage in self.stages))


# 135 epochs, 25 of them warm-up, of Objects365's 1.74 million photos in batches of 768; then 50 000 steps.
OBJECTS365 = Schedule(
    (
        Stage((Mix(306_000, {256: 1.0}),), lr=4e-4, min_lr=5e-5, warmup=56_700),
        Stage(
            (
                Mix(7_000, {256: 0.35, 384: 0.35, 512: 0.30}),
                Mix(43_000, {256: 0.15, 384: 0.25, 512: 0.30, 768: 0.30}),
            ),
            lr=8e-5,
            min_lr=3e-5,
            warmup=7_000,
        ),
    )
)

# Small crops first: a step at 112 px costs a quarter of one at 224. Both are whole patches of 14 and of 16 px.
SMALL = Schedule(
    (
        Stage((Mix(5_500, {112: 0.75, 224: 0.25}),), lr=1e-3, min_lr=3e-4, warmup=300),
        Stage((Mix(1_500, {224: 1.0}),), lr=3e-4, min_lr=1e-5, warmup=50),
    )
)

PRESETS = {"small": SMALL, "objects365": OBJECTS365}
"""Name -> schedule: "objects365" is the paper's, "small" is for a CPU and some thousands of photos."""
