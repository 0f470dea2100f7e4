"""The processes that torchrun starts, and how they split work and put it together again."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One process among those that share a job.

    Args:
        rank: this process's number, from 0.
        size: number of processes.
        local_rank: this process's number on its machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Give this process its part: every size-th item, so that long and short ones spread.

        Args:
            items: the whole work, the same in every process.

        Returns:
            This process's part.

        Example:
            >>> Ranks(1, 2).share("abcde")
            'bd'
        """
        return items[self.rank :: self.size]

    def gather(self, part: T) -> list[T]:
        """Exchange results; every process waits here for the last.

        Args:
            part: this process's result; it must pickle.

        Returns:
            The results of all processes in the order of their ranks, the same in every process.
        """
        if self.size == 1:
            return [part]
        import torch.distributed as dist

        parts: list[T | None] = [None] * self.size
        dist.all_gather_object(parts, part)
        return [p for p in parts if p is not None]


@contextlib.contextmanager
def torchrun_ranks() -> Iterator[Ranks]:
    """Join the processes that torchrun started; alone, if it did not.

    Returns:
        A context manager that yields this process's place.

    Example:
        >>> with torchrun_ranks() as ranks:
        ...     ranks.size
        1
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield Ranks()
        return
    import torch.distributed as dist

    # Its functions take the world's group as a default when first imported. Imported later (torch._dynamo does), they
    # would hold the group past its end, and the group's threads, still there at exit, abort the process now and then.
    importlib.import_module("torch.distributed.nn")

    # The ranks meet only once all photos are done, and one may be hours behind another.
    dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield Ranks(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
    finally:
        dist.destroy_process_group()
