"""What happens between two steps: comparing, keeping the best student, checkpoints, Ctrl-C, progress."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch.distributed as dist

from selectivit.train.checkpoints import CHECKPOINT
from selectivit.train.step_module import StepModule

PATIENCE_S = 2.0
"""A second Ctrl-C after this long stops at once; torchrun passes the first one on twice."""


@dataclass(frozen=True)
class StepReport:
    """Where a run is.

    Args:
        step: steps done.
        steps: steps in all.
        images_per_second: of all processes, over the last steps.
        steps_per_second: likewise.
        values: losses, learning rate, norm of the gradients of the last step.
        validation: the last comparison or test on photos kept out of training; empty before the first.
        warnings: what has looked wrong so far.
    """

    step: int
    steps: int
    images_per_second: float
    steps_per_second: float
    values: dict[str, float]
    validation: dict[str, float]
    warnings: tuple[str, ...] = ()


class Keeper(L.Callback):
    """Does all that, in one fixed order after each step, so that a run killed anywhere repeats what it had not kept.

    Args:
        out: the run's folder.
        compare: called in all processes; what is found on photos kept out of training, empty where there are none.
        best_by: which of these numbers says what is best, the larger the better.
        validate_every: steps between comparisons.
        checkpoint_every: steps between checkpoints.
        compare_start: compare before the first step too: a student that knows something may only get worse.
        save_best: called in the first process with the step and the numbers when a model is the best yet.
        tell: called in the first process after each step.
    """

    def __init__(
        self,
        out: Path,
        compare: Callable[[L.Trainer], dict[str, float]],
        best_by: str,
        validate_every: int,
        checkpoint_every: int,
        compare_start: bool,
        save_best: Callable[[int, dict[str, float]], None],
        tell: Callable[[StepReport], None],
    ):
        self.out, self.compare, self.best_by = out, compare, best_by
        self.validate_every, self.checkpoint_every = validate_every, checkpoint_every
        self.compare_start, self.save_best, self.tell = compare_start, save_best, tell
        self.saved = 0  # step of the last checkpoint
        self.validation: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self._seen = 0
        self._clock = _Clock()
        self._handlers: dict[int, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside weights, optimiser and step."""
        return {"validation": self.validation, "best": self.best, "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.validation, self.best, self.skipped = (state_dict[name] for name in ("validation", "best", "skipped"))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the student as it comes; listen for Ctrl-C and the system's request to end."""
        self._seen = self.saved = trainer.global_step
        if self.compare_start and trainer.global_step == 0:
            self._validate(trainer)
        self._clock.start()
        if threading.current_thread() is not threading.main_thread():
            return
        module = _ours(pl_module)
        asked: list[float] = []

        def ask(number: int, _: FrameType | None) -> None:
            module.wants_to_stop = True
            if number == signal.SIGINT and asked and time.monotonic() - asked[0] > PATIENCE_S:
                raise KeyboardInterrupt
            asked.append(time.monotonic())

        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # who starts us may have decided so
                self._handlers[number] = signal.signal(number, ask)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back."""
        self._release()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._release()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare, save, tell: in this order, once a step."""
        step, module = trainer.global_step, _ours(pl_module)
        if step == self._seen:  # a part of a step
            return
        self._seen = step
        last = step == module.steps
        if step % self.validate_every == 0 or last:
            self._validate(trainer)
        if step % self.checkpoint_every == 0 or last or module.stopping:
            self._gather_skipped(module)
            trainer.save_checkpoint(self.out / CHECKPOINT)
            self.saved = step
        trainer.should_stop = trainer.should_stop or module.stopping
        if trainer.is_global_zero:
            pace = self._clock.tick()
            speed = pace * module.settings.batch_size
            if trainer.logger is not None and (step % 10 == 0 or last):
                logged = {f"train/{name}": value for name, value in module.latest.items()}
                trainer.logger.log_metrics({**logged, "train/images_per_second": speed}, step)
            warnings = tuple(getattr(module, "warnings", ()))
            self.tell(StepReport(step, module.steps, speed, pace, dict(module.latest), self.validation, warnings))

    def _validate(self, trainer: L.Trainer) -> None:
        self.validation = self.compare(trainer)
        better = self.validation and self.validation[self.best_by] > self.best.get(self.best_by, -2.0)
        if better:
            self.best = {**self.validation, "step": trainer.global_step}
        if trainer.is_global_zero and self.validation:
            if trainer.logger is not None:
                logged = {f"validation/{name}": value for name, value in self.validation.items()}
                trainer.logger.log_metrics(logged, trainer.global_step)
            if better:
                self.save_best(trainer.global_step, self.best)

    def _gather_skipped(self, module: StepModule) -> None:
        parts: list[Any] = [module.skipped]
        if dist.is_available() and dist.is_initialized():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, module.skipped)
        for part in parts:
            self.skipped.update(part)

    def _release(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class _Clock:
    """Steps a second, smoothed over about twenty."""

    def start(self) -> None:
        self.last, self.seconds = time.perf_counter(), 0.0

    def tick(self) -> float:
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.seconds = seconds if self.seconds == 0 else 0.95 * self.seconds + 0.05 * seconds
        return 1 / max(self.seconds, 1e-9)


def _ours(module: L.LightningModule) -> StepModule:
    assert isinstance(module, StepModule)
    return module


def no_report(report: StepReport) -> None:
    """Say nothing."""
