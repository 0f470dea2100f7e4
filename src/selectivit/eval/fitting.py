"""A short training of a probe's head, step by step: every draw is a function of the step, so it can be stopped."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from selectivit.data.writing import write_atomic


@dataclass(frozen=True)
class FitSettings:
    """How a head is trained: AdamW, a linear warm-up, then down to 0.

    Args:
        steps: of the optimiser.
        lr: peak learning rate.
        weight_decay: AdamW's.
        warmup: steps from 0 to the peak.
        decay: "linear" or "cosine".
        batch_size: patches or photos a step, as the probe says.

    Raises:
        ValueError: a number that is too small, or another decay.

    Example:
        >>> settings = FitSettings(steps=10, lr=1.0, weight_decay=0.0, warmup=2, decay="linear", batch_size=1)
        >>> [round(settings.factor(step), 3) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    steps: int
    lr: float
    weight_decay: float
    warmup: int
    decay: str
    batch_size: int

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size) < 1 or not 0 <= self.warmup or self.decay not in ("linear", "cosine"):
            raise ValueError(f"expected steps and batches of 1 or more and a linear or cosine decay, got {self}")
        if not 0 < self.lr < math.inf or not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"expected a learning rate above 0 and a weight decay of 0 or more, got {self}")

    def factor(self, step: int) -> float:
        """What the peak rate is multiplied with at a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = 1 - (step - self.warmup) / max(1, self.steps - self.warmup)
        return left if self.decay == "linear" else (1 - math.cos(math.pi * left)) / 2

    def optimizer(self, head: nn.Module) -> torch.optim.Optimizer:
        """AdamW on all of a head."""
        return torch.optim.AdamW(head.parameters(), lr=self.lr, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Keeping:
    """Where an unfinished training is kept.

    Args:
        path: of the checkpoint, written every few steps and removed at the end; None keeps none.
        identity: of all that decides the result; a checkpoint of another one is not gone on with.
        every: steps between checkpoints.
    """

    path: Path | None = None
    identity: str = ""
    every: int = 200


NOT_KEPT = Keeping()


def fit(
    head: nn.Module,
    loss_at: Callable[[int], Tensor],
    optimizer: torch.optim.Optimizer,
    factor: Callable[[int], float],
    steps: int,
    keeping: Keeping = NOT_KEPT,
    tell: Callable[[str | None], None] = lambda line: None,
) -> None:
    """Train a head, from its last checkpoint if there is one.

    Args:
        head: trained in its place; in eval mode afterwards.
        loss_at: the loss of a step, whose batch and augmentations are drawn by the step's number alone.
        optimizer: over the head; the rates it was made with are the peaks.
        factor: step -> what the rates are multiplied with.
        steps: how many.
        keeping: where the state is kept.
        tell: called after each step.

    Raises:
        ValueError: the loss is not finite.
        WriteError: the checkpoint cannot be written.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    start = 0 if keeping.path is None else _restore(keeping, head, optimizer)
    for _ in range(start):
        tell(None)
    head.train()
    for step in range(start, steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor(step)
        loss = loss_at(step)
        if not bool(loss.isfinite()):
            raise ValueError(f"the loss is {loss.item()} at step {step}: expected finite numbers; give a smaller rate")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(None)
        if keeping.path is not None and (step + 1) % keeping.every == 0 and step + 1 < steps:
            state = {"identity": keeping.identity, "step": step + 1, "head": head.state_dict()}
            buffer = io.BytesIO()
            torch.save({**state, "optimizer": optimizer.state_dict()}, buffer)
            write_atomic(keeping.path, buffer.getvalue())
    if keeping.path is not None:
        keeping.path.unlink(missing_ok=True)
    head.eval()


def _restore(keeping: Keeping, head: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    assert keeping.path is not None
    try:
        state = torch.load(keeping.path, weights_only=True, map_location=next(head.parameters()).device)
    except FileNotFoundError:
        return 0
    except Exception:  # damaged, or none of ours: trained anew, as without it
        return 0
    if not isinstance(state, dict) or state.get("identity") != keeping.identity:
        return 0
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
