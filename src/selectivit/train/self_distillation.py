"""DINO's training step as Lightning wants it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from selectivit.data.multi_crop import MultiCropBatch
from selectivit.data.seeding import derived_seed
from selectivit.train.collapse import CollapseWatch, Look, batch_sums
from selectivit.train.dino_loss import StepwiseDINOLoss
from selectivit.train.dino_pair import DinoPair
from selectivit.train.dino_schedule import DinoSchedule
from selectivit.train.dino_settings import DinoSettings
from selectivit.train.loader import StepBatches
from selectivit.train.step_module import StepModule


class SelfDistillation(StepModule):
    """Student and teacher on the crops of a step; all that is random in it follows from the seed and the sample.

    Args:
        pair: student and teacher.
        settings: what decides the result.
        schedule: what changes from step to step.
        batches: this process's samples, to check that data and step agree.
    """

    def __init__(self, pair: DinoPair, settings: DinoSettings, schedule: DinoSchedule, batches: StepBatches):
        super().__init__(settings, batches)
        self.pair, self.schedule = pair, schedule
        self.loss = StepwiseDINOLoss(settings.out_dim, settings.student_temperature, settings.center_momentum)
        self.watch = CollapseWatch(grace=min(max(100, schedule.steps_of(1)), schedule.steps // 5))
        self.warnings: list[str] = []
        self._sums: Tensor | None = None

    def transfer_batch_to_device(
        self, batch: MultiCropBatch, device: torch.device, dataloader_idx: int
    ) -> MultiCropBatch:
        """Move the crops; 8-bit, a quarter of the traffic."""
        large, small = (crops.to(device, non_blocking=True) for crops in (batch.large, batch.small))
        return MultiCropBatch(large, small, batch.first, batch.skipped)

    def training_step(self, batch: MultiCropBatch, batch_idx: int) -> Tensor:
        """The loss of one part of a step."""
        step, part = self.enter_part(batch.first, batch.skipped, batch_idx)
        features, taught = self.pair.teach(batch.large)
        learnt = self.pair.study(batch.large, batch.small, self._numbers(batch, step))
        temperature = self.schedule.teacher_temperature(step)
        count = batch.large.shape[1]
        with torch.autocast(self.device.type, enabled=False):
            taught, learnt = taught.float(), learnt.float()
            loss = self.loss(list(taught.split(count)), list(learnt.split(count)), teacher_temp=temperature)
            sums = batch_sums(taught, self.loss.probabilities(taught, temperature), features)
        self._sums = sums if part == 0 or self._sums is None else self._sums + sums
        self.note_part({"loss": float(loss.detach())}, part)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Look at gradients and outputs, set what the schedule says, clip, and keep the last layer if it is frozen."""
        step, schedule = self.trainer.global_step, self.schedule
        self._look(step)
        norm = self.agree(self.pair.trained())
        rate, decay = schedule.rate(step), schedule.weight_decay(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = decay if group["decays"] else 0.0
        self.latest |= {"lr": rate, "weight_decay": decay, "gradient_norm": norm}
        if self.settings.clip:
            for parameter in self.pair.trained():  # each on its own, as the authors do
                nn.utils.clip_grad_norm_(parameter, self.settings.clip)
        if schedule.last_layer_frozen(step):
            for parameter in self.pair.student_head.last_layer.parameters():
                parameter.grad = None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Step, and let the teacher follow before anything is saved."""
        step = self.trainer.global_step
        optimizer.step(closure=optimizer_closure)
        self.pair.follow(self.schedule.momentum(step))

    def configure_optimizers(self) -> AdamW:
        """AdamW; biases and norms are not decayed, positions and tokens are, as in the authors' code."""
        decayed, plain = split_decayed(self.pair)
        groups = [{"params": decayed, "decays": True}, {"params": plain, "decays": False}]
        return AdamW([group for group in groups if group["params"]], lr=self.schedule.rate(0), fused=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What was seen of a collapse goes with the weights."""
        checkpoint["collapse"] = {"lasting": self.watch.lasting, "told": self.watch.told, "warnings": self.warnings}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what `on_save_checkpoint` gave."""
        kept = checkpoint["collapse"]
        self.watch.lasting, self.watch.told, self.warnings = kept["lasting"], kept["told"], kept["warnings"]

    def _numbers(self, batch: MultiCropBatch, step: int) -> Tensor | None:
        """The random numbers of stochastic depth: a function of step, layer, crop and photo, however it is split."""
        if not self.pair.drops:
            return None
        generator = torch.Generator().manual_seed(derived_seed(self.settings.seed, "drop_path", step))
        views = len(batch.large) + len(batch.small)
        numbers = torch.rand(len(self.pair.drops), views, self.settings.batch_size, generator=generator)
        start = batch.first - step * self.settings.batch_size
        return numbers[:, :, start : start + batch.large.shape[1]].to(self.device)

    def _look(self, step: int) -> None:
        assert self._sums is not None
        sums, self._sums = self._sums, None
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        look = Look.at(sums, self.settings.out_dim)
        self.loss.move_center(look.mean_output)
        seen = ("teacher_entropy", "mean_entropy", "information", "feature_spread")
        self.latest |= {name: getattr(look, name) for name in seen}
        self.latest["divergence"] = self.latest["loss"] - look.teacher_entropy * math.log(self.settings.out_dim)
        warning = self.watch.judge(look, step)
        if warning:
            self.warnings.append(warning)


def split_decayed(pair: DinoPair) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Sort the trained parameters.

    Args:
        pair: student and head.

    Returns:
        Those that are decayed; and biases, norms and scales, which are not.

    Source: `get_params_groups` of DINO's public code.
    """
    decayed, plain = [], []
    for part in (pair.student, pair.student_head):
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                (plain if name.endswith(".bias") or parameter.ndim == 1 else decayed).append(parameter)
    return decayed, plain
