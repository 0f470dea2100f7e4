"""The training step as Lightning wants it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from selectivit.data.seeding import derived_seed, seeded
from selectivit.data.training_images import Batch
from selectivit.train.budget import BudgetDraw, published_draw
from selectivit.train.loader import StepBatches
from selectivit.train.losses import distillation_losses
from selectivit.train.optimizers import MuonAdamW
from selectivit.train.pair import Pair
from selectivit.train.schedule import Schedule
from selectivit.train.settings import DistillSettings
from selectivit.train.step_module import NotFiniteError, StepModule
from selectivit.train.teacher_cache import TeacherCache

__all__ = ["Distillation", "NotFiniteError"]


class Distillation(StepModule):
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
        super().__init__(settings, batches)
        self.pair, self.schedule, self.cache = pair, schedule, cache
        self.draw: BudgetDraw | None = None
        if pair.num_cores is not None:
            self.draw = settings.budgets or published_draw(pair.num_cores)

    def on_fit_start(self) -> None:
        """Put the teacher beside the student: as no submodule it is not moved by Lightning."""
        self.pair.teacher.to(self.device)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Move the images; 8-bit, a quarter of the traffic."""
        return replace(batch, images=batch.images.to(device, non_blocking=True))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one part of a step."""
        step, part = self.enter_part(batch.first, batch.skipped, batch_idx)
        budget = None if self.draw is None else self.draw.at(step, self.settings.seed)
        # The same numbers in all processes and parts: a student's own augmentation is one draw a step.
        with seeded(derived_seed(self.settings.seed, "student", step), self.device):
            taught = None if self.cache is None else self.cache.teach(batch)
            student, teacher = self.pair.both(batch.images, budget, taught)
        parts = distillation_losses(student, teacher, self.settings.losses)
        values = torch.stack(list(parts.values())).detach().tolist()  # one wait for the card, not four
        self.note_part(dict(zip(parts, values, strict=True)), part)
        return parts["loss"]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Look at the gradients, and set the step's rate."""
        norm = self.agree(self.pair.parameters())
        rate = self.schedule.rate(self.trainer.global_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        self.latest |= {"lr": rate, "gradient_norm": norm}

    def configure_optimizers(self) -> MuonAdamW:
        """Muon and AdamW over the student, its head and its learnt factors."""
        settings = self.settings
        return MuonAdamW(self.pair, self.schedule.rate(0), settings.weight_decay, settings.optimizer == "muon")
