"""DINO's schedules: rate, weight decay, momentum and temperature as functions of the step."""

from __future__ import annotations

from dataclasses import dataclass

from lightly.utils.scheduler import cosine_schedule, cosine_warmup_schedule

from selectivit.train.dino_settings import DinoSettings


@dataclass(frozen=True)
class DinoSchedule:
    """What changes from step to step.

    Args:
        settings: of the run.
        photos: that it is trained on.

    Example:
        >>> schedule = DinoSchedule(DinoSettings(batch_size=256, epochs=100), photos=25600)
        >>> schedule.steps, schedule.rate(999), round(schedule.momentum(0), 4), schedule.momentum(9999)
        (10000, 0.0005, 0.996, 1.0)

    Source: DINO, arXiv 2104.14294, and its public code.
    """

    settings: DinoSettings
    photos: int

    @property
    def steps(self) -> int:
        """How many steps there are in all."""
        settings = self.settings
        return settings.steps or settings.epochs * max(1, self.photos // settings.batch_size)

    def steps_of(self, epochs: float) -> int:
        """How many steps some epochs have."""
        return round(epochs * self.steps / self.settings.epochs)

    def size(self, step: int, seed: int) -> int:
        """The side of a step's large crops, pixels."""
        return self.settings.crops.global_size

    def rate(self, step: int) -> float:
        """The learning rate: a straight line up, a cosine down."""
        settings = self.settings
        peak = settings.lr * settings.batch_size / 256
        warmup = self.steps_of(settings.warmup_epochs)
        return cosine_warmup_schedule(step, self.steps, peak, settings.min_lr, warmup, 0.0)

    def weight_decay(self, step: int) -> float:
        """The weight decay: a cosine."""
        return cosine_schedule(step, self.steps, self.settings.weight_decay, self.settings.weight_decay_end)

    def momentum(self, step: int) -> float:
        """How much of itself the teacher keeps: a cosine to 1."""
        return cosine_schedule(step, self.steps, self.settings.teacher_momentum, 1.0)

    def teacher_temperature(self, step: int) -> float:
        """The temperature of the teacher's softmax: a straight line, then constant."""
        start, end = self.settings.warmup_teacher_temperature, self.settings.teacher_temperature
        warmup = self.steps_of(self.settings.warmup_teacher_epochs)
        return end if step >= warmup else start + (end - start) * step / warmup

    def last_layer_frozen(self, step: int) -> bool:
        """Whether the head's last layer stays as it is."""
        return step < self.steps_of(self.settings.freeze_last_layer)
