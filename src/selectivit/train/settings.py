"""What decides the result of a distillation, and what does not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selectivit.train.budget import BudgetDraw
from selectivit.train.losses import LossWeights
from selectivit.train.optimizers import OPTIMIZERS
from selectivit.train.schedule import PRESETS, Schedule
from selectivit.train.tokens import GRIDS

PRECISIONS = ("auto", "bf16", "float32")


@dataclass(frozen=True)
class DistillSettings:
    """What decides the weights that come out.

    Args:
        schedule: image sizes and learning rates by step: "small", "objects365" (the paper's), or one's own.
        steps: optimiser steps; the schedule is stretched to them. None keeps its own number.
        batch_size: photos a step, of all processes together.
        accumulate: parts that a step's batch is computed in, one after the other, where memory is short.
        lr: peak learning rate of the first stage; the others keep their proportion. None keeps the schedule's own.
        weight_decay: of weights; biases, norms, tokens and coordinates have none.
        optimizer: "muon" (Muon on the matrices in the blocks, AdamW on the rest) or "adamw".
        losses: what each part counts.
        budgets: how the budget of a core-periphery student is drawn; None is the paper's draw.
        grid: "refuse" or "interpolate" a teacher's grid that differs from the student's.
        augment: flips, and TrivialAugmentWide; crops are random anyway.
        views: crops of each photo, which come again in turns, so that the teacher's tokens of them are computed once
            and kept on the disk; None draws a new crop each time.
        learn_scale: train the factors of a swapped student, one a head.
        precision: "bf16", "float32", or "auto": bf16 where the device computes in it.
        holdout: photos kept out of training, on which the student is compared with the teacher; at most a fifth.
        validate_every: steps between such comparisons; the best student is kept.
        seed: of all random numbers.

    Raises:
        ValueError: a number or name outside these.

    Example:
        >>> DistillSettings(steps=100).full_schedule().steps
        100
    """

    schedule: str | Schedule = "small"
    steps: int | None = None
    batch_size: int = 32
    accumulate: int = 1
    lr: float | None = None
    weight_decay: float = 0.015
    optimizer: str = "muon"
    losses: LossWeights = field(default_factory=LossWeights)
    budgets: BudgetDraw | None = None
    grid: str = "refuse"
    augment: bool = True
    views: int | None = None
    learn_scale: bool = False
    precision: str = "auto"
    holdout: int = 64
    validate_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        known = {"grid": GRIDS, "optimizer": OPTIMIZERS, "precision": PRECISIONS}
        if isinstance(self.schedule, str):
            known["schedule"] = tuple(PRESETS)
        for name, names in known.items():
            if getattr(self, name) not in names:
                raise ValueError(f"expected {name} to be one of {', '.join(names)}, got {getattr(self, name)!r}")
        least = {"batch_size": 1, "accumulate": 1, "holdout": 0, "validate_every": 1}
        for name, low in {**least, "steps": 1, "views": 1}.items():
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ValueError(f"expected {name} of at least {low}, got {getattr(self, name)}")
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ValueError(f"expected a learning rate above 0, got {self.lr}")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"expected a weight decay of 0 or more, got {self.weight_decay}")

    def full_schedule(self) -> Schedule:
        """The schedule in its number of steps and at its rate."""
        schedule = PRESETS[self.schedule] if isinstance(self.schedule, str) else self.schedule
        schedule = schedule if self.steps is None else schedule.scaled(self.steps)
        return schedule if self.lr is None else schedule.at_rate(self.lr)

    def record(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        return asdict(self)


@dataclass(frozen=True)
class Running:
    """How a run is carried out; none of it changes what comes out, but for rounding.

    Args:
        device: where to compute: "cpu", "cuda" or "cuda:1"; under torchrun each process takes its own card.
        workers: processes that read photos, for each training process; None is one a core that is left, at most 8.
        checkpoint_every: steps between checkpoints.
        teacher_cache: folder for the teacher's tokens where `DistillSettings.views` is given; runs may share it. None
            is a folder beside the run's checkpoints.

    Raises:
        ValueError: a number that is too small.
    """

    device: str = "cpu"
    workers: int | None = None
    checkpoint_every: int = 200
    teacher_cache: Path | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1 or (self.workers is not None and self.workers < 0):
            raise ValueError(
                f"expected checkpoint_every of 1 or more and workers of 0 or more, got {self.checkpoint_every} and "
                f"{self.workers}"
            )
