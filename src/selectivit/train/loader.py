"""The batches of each step: a function of the step and the process's number, entered anywhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from selectivit.data.training_images import Sample, collate


class Steps(Protocol):
    """A schedule, as far as samples depend on it."""

    @property
    def steps(self) -> int:
        """How many steps there are in all."""
        ...

    def size(self, step: int, seed: int) -> int:
        """The side of a step's crops, pixels."""
        ...


class StepBatches(Sampler[list[Sample]]):
    """Samples of every part of every step for one process.

    Step s takes the samples s · batch_size … (s + 1) · batch_size − 1; part by part, and in each part rank by rank.

    Args:
        schedule: gives the steps, and their image sizes.
        batch_size: of all processes and parts together.
        accumulate: parts of a step.
        rank: this process's number.
        world_size: number of processes.
        seed: the run's.
        start: the first step.

    Raises:
        ValueError: a batch that cannot be split evenly.

    Example:
        >>> from selectivit.train.schedule import SMALL
        >>> batches = StepBatches(SMALL.scaled(2), batch_size=4, accumulate=1, rank=1, world_size=2, seed=0, start=1)
        >>> [[sample.number for sample in batch] for batch in batches], len(batches)
        ([[6, 7]], 2)
    """

    def __init__(
        self, schedule: Steps, batch_size: int, accumulate: int, rank: int, world_size: int, seed: int, start: int
    ):
        if batch_size % (accumulate * world_size):
            raise ValueError(
                f"expected a batch size that {world_size} processes and {accumulate} parts divide evenly, "
                f"got {batch_size}"
            )
        self.schedule, self.batch_size, self.accumulate = schedule, batch_size, accumulate
        self.rank, self.seed, self.start = rank, seed, start
        self.share = batch_size // (accumulate * world_size)

    def __iter__(self) -> Iterator[list[Sample]]:
        for step in range(self.start, self.schedule.steps):
            size = self.schedule.size(step, self.seed)
            for part in range(self.accumulate):
                first = self.first(step, part)
                yield [Sample(number, size) for number in range(first, first + self.share)]

    def first(self, step: int, part: int) -> int:
        """The number of the first sample of this process in a part of a step."""
        return step * self.batch_size + part * self.batch_size // self.accumulate + self.rank * self.share

    def __len__(self) -> int:
        """Batches of the whole run, those before the start too: so Lightning counts."""
        return self.schedule.steps * self.accumulate


def own_batches(schedule: Any, settings: Any, start: int = 0) -> StepBatches:
    """The batches of this process, by what torchrun says of it.

    Args:
        schedule: gives the steps.
        settings: hold batch_size, accumulate and seed.
        start: the first step.

    Returns:
        The batches.

    Raises:
        ValueError: a batch that cannot be split evenly.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return StepBatches(schedule, settings.batch_size, settings.accumulate, rank, world, settings.seed, start)


class StepLoader(DataLoader[Any]):
    """A loader that needs no state of its own to be entered anywhere: where it starts is its sampler's business."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning asks for it to see that the loader can be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def check_worker_number_rationality(self) -> None:
        """No warning: who names more workers than cores means it."""


def make_loader(
    images: Dataset[Any],
    batches: StepBatches,
    workers: int | None,
    pin: bool,
    collate: Callable[[list[Any]], Any] = collate,
) -> StepLoader:
    """The loader of one process.

    Args:
        images: the photos.
        batches: which of them, step by step.
        workers: processes that read and augment; None is one a core that is left, at most 8.
        pin: put batches into memory that a card can fetch from.
        collate: from samples to a batch.

    Returns:
        The loader.
    """
    count = workers if workers is not None else spare_cores()
    options: dict[str, Any] = {"prefetch_factor": 4} if count else {}
    return StepLoader(
        images,
        batch_sampler=batches,
        num_workers=count,
        collate_fn=collate,
        worker_init_fn=quiet_worker,
        pin_memory=pin,
        **options,
    )


def spare_cores() -> int:
    """Cores that this process may use and torch leaves free, shared among the machine's ranks; 1 to 8."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, allowed // ranks - 1))


def quiet_worker(_: int) -> None:
    """Ctrl-C reaches the whole group of processes; the main one finishes its step and needs its workers for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
