"""The training step as Lightning wants it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor

from selectivit.data.seeding import derived_seed, seeded
from selectivit.data.training_images import Batch
from selectivit.train.budget import BudgetDraw, published_draw
from selectivit.train.loader import StepBatches
from selectivit.train.losses import distillation_losses
from selectivit.train.optimizers import MuonAdamW, gradients_finite
from selectivit.train.pair import Pair
from selectivit.train.schedule import Schedule
from selectivit.train.settings import DistillSettings
from selectivit.train.teacher_cache import TeacherCache


class NotFiniteError(ValueError):
    """The loss or its gradients hold NaN or infinity; the text names the step."""


class Distillation(L.LightningModule):
    """Student and teacher on the batch of a step; all that is random in it follows from the seed and the step.

    Args:
        pair: student and teacher.
        settings: what decides the result.
        schedule: sizes and rates by step.
        batches: this process's samples, to check that data and step agree.
        cache: of the teacher's tokens, where crops come again.
    """

    def __init__(
        self,
        pair: Pair,
        settings: DistillSettings,
        schedule: Schedule,
        batches: StepBatches,
        cache: TeacherCache | None = None,
    ):
        super().__init__()
        self.cache = cache
        self.pair, self.settings, self.schedule, self.batches = pair, settings, schedule, batches
        self.draw: BudgetDraw | None = None
        if pair.num_cores is not None:
            self.draw = settings.budgets or published_draw(pair.num_cores)
        self.latest: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self.wants_to_stop = False  # set by a signal in any process
        self.stopping = False  # agreed on by all
        self._part = 0

    def on_fit_start(self) -> None:
        """Put the teacher beside the student: as no submodule it is not moved by Lightning."""
        self.pair.teacher.to(self.device)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Move the images; 8-bit, a quarter of the traffic."""
        return replace(batch, images=batch.images.to(device, non_blocking=True))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one part of a step."""
        step, self._part = self.trainer.global_step, batch_idx % self.settings.accumulate
        expected = self.batches.first(step, self._part)
        if batch.first != expected:
            raise RuntimeError(f"step {step} expects samples from {expected} on, the loader gave {batch.first}")
        self.skipped.update(batch.skipped)
        budget = None if self.draw is None else self.draw.at(step, self.settings.seed)
        # The same numbers in all processes and parts: a student's own augmentation is one draw a step.
        with seeded(derived_seed(self.settings.seed, "student", step), self.device):
            taught = None if self.cache is None else self.cache.teach(batch)
            student, teacher = self.pair.both(batch.images, budget, taught)
        parts = distillation_losses(student, teacher, self.settings.losses)
        values = torch.stack(list(parts.values())).detach().tolist()  # one wait for the card, not four
        found = dict(zip(parts, values, strict=True))
        whole = self.latest if self._part else {}
        share = 1 / self.settings.accumulate
        self.latest = {name: whole.get(name, 0.0) + value * share for name, value in found.items()}
        return parts["loss"]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Stop all processes where one has numbers that are not finite, before they reach the weights."""
        finite, norm = gradients_finite(self.pair.parameters())
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
        rate = self.schedule.rate(self.trainer.global_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        self.latest |= {"lr": rate, "gradient_norm": norm}

    def configure_optimizers(self) -> MuonAdamW:
        """Muon and AdamW over the student, its head and its learnt factors."""
        settings = self.settings
        return MuonAdamW(self.pair, self.schedule.rate(0), settings.weight_decay, settings.optimizer == "muon")
