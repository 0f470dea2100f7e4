"""Block shapes of the Triton kernels, by rows' length, head width and dtype: a table, nothing tuned at run time."""

from __future__ import annotations

import dataclasses

from torch import Tensor

LONGEST = 1 << 24  # of queries or keys: a bit stands for a 64th of a row
SHORT = 1024  # up to here a block of rows keeps all its scores in registers


@dataclasses.dataclass(frozen=True)
class Plan:
    """A forward kernel's block of query rows and of keys; chunks of keys in a strip, or 0 and blocks of keys a bit."""

    rows: int
    keys: int
    chunks: int
    group: int
    warps: int
    stages: int

    def blocks(self, n: int) -> int:
        """Blocks of query rows."""
        return -(-n // self.rows)


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """Blocks of the kernel over query rows, and of the kernel over keys."""

    query_rows: int
    query_keys: int
    key_rows: int
    key_keys: int
    warps: int
    stages: int


def padded(width: int) -> int:
    """The power of two, 16 or more, that holds a head."""
    return max(16, 1 << (width - 1).bit_length())


def plan_forward(q: Tensor, v: Tensor) -> Plan:
    """Choose the forward kernel's blocks for q (…, N, D) and v (…, M, E)."""
    m, width, single = v.shape[-2], padded(max(q.shape[-1], v.shape[-1])), q.element_size() == 4
    if m <= SHORT:
        rows = 64 if m <= 256 else 32 if m <= 512 else 16
        return Plan(rows, 64, chunks=-(-m // 64), group=1, warps=4 if m <= 256 else 8, stages=1)
    rows = 32 if single and width > 64 else 64
    return Plan(rows, 64, chunks=0, group=-(-m // (64 * 64)), warps=4, stages=1 if single else 2)


def plan_backward(q: Tensor, v: Tensor) -> BackwardPlan:
    """Choose the backward kernels' blocks; each divides what the forward kernel's words speak of."""
    return BackwardPlan(64, 64, 64, 64, warps=4, stages=1)
