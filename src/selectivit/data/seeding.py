"""Random numbers that are a function of a seed and a place, so that a stopped run goes on as if it had not stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derived_seed(*parts: int | str) -> int:
    """Mix a seed with names and numbers into another seed.

    Args:
        parts: such as the run's seed, what is drawn, and the step.

    Returns:
        0 … 2³² − 1: torch's generator on the CPU keeps no more bits of a seed.

    Example:
        >>> derived_seed(0, "crop", 7) == derived_seed(0, "crop", 7), derived_seed(0, "crop", 8) == derived_seed(0, 8)
        (True, False)
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw torch's random numbers from a seed for a while; the generators are then as they were.

    Args:
        seed: any.
        device: a CUDA device whose generator is seeded beside the CPU's.

    Returns:
        A context manager.

    Example:
        >>> with seeded(3):
        ...     a = torch.rand(2)
        >>> with seeded(3):
        ...     bool((torch.rand(2) == a).all())
        True
    """
    cards = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards):
        torch.default_generator.manual_seed(seed)
        for card in cards:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(seed)
        yield
