"""What every training of ours is to Lightning: steps whose data is checked, and processes that stop together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import nn

from selectivit.train.loader import StepBatches
from selectivit.train.optimizers import gradients_finite


class NotFiniteError(ValueError):
    """The loss or its gradients hold NaN or infinity; the text names the step."""


class StepSettings(Protocol):
    """What a trainer must know of a training's settings."""

    @property
    def batch_size(self) -> int:
        """Photos a step, of all processes together."""
        ...

    @property
    def accumulate(self) -> int:
        """Parts that a step's batch is computed in."""
        ...


class StepModule(L.LightningModule):
    """The common part of our trainings.

    Args:
        settings: what decides the result.
        batches: this process's samples, to check that data and step agree.
    """

    settings: Any

    def __init__(self, settings: StepSettings, batches: StepBatches):
        super().__init__()
        self.settings, self.batches = settings, batches
        self.latest: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self.wants_to_stop = False  # set by a signal in any process
        self.stopping = False  # agreed on by all

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.batches.schedule.steps

    def enter_part(self, first: int, skipped: Iterable[tuple[str, str]], batch_idx: int) -> tuple[int, int]:
        """Check that a batch is the one that the step expects.

        Args:
            first: the number of its first sample.
            skipped: what could not be read on the way.
            batch_idx: Lightning's.

        Returns:
            The step, and the part of it.
        """
        step, part = self.trainer.global_step, batch_idx % self.settings.accumulate
        expected = self.batches.first(step, part)
        if first != expected:
            raise RuntimeError(f"step {step} expects samples from {expected} on, the loader gave {first}")
        self.skipped.update(skipped)
        return step, part

    def note_part(self, found: dict[str, float], part: int) -> None:
        """Add a part's values to those of its step."""
        whole = self.latest if part else {}
        share = 1 / self.settings.accumulate
        self.latest = {name: whole.get(name, 0.0) + value * share for name, value in found.items()}

    def agree(self, parameters: Iterable[nn.Parameter]) -> float:
        """Stop all processes where one has numbers that are not finite, before they reach the weights.

        Args:
            parameters: those that are trained.

        Returns:
            The norm of their gradients.

        Raises:
            NotFiniteError: in all processes, if one has such numbers.
        """
        finite, norm = gradients_finite(parameters)
        finite = finite and all(map(math.isfinite, self.latest.values()))
        flags = torch.tensor([not finite, self.wants_to_stop], dtype=torch.int32, device=self.device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        broken, stop = flags.tolist()
        if broken:
            raise NotFiniteError(
                f"loss or gradients are not finite at step {self.trainer.global_step} (loss {self.latest['loss']}, "
                f"norm of the gradients {norm}): the last good checkpoint is kept; a lower learning rate, a longer "
                "warm-up or float32 may help, in a new folder"
            )
        self.stopping = bool(stop)
        return norm
