"""Block shapes of the Triton kernels, by rows' length, head width and dtype: a table, nothing tuned at run time."""

from __future__ import annotations

import dataclasses

from torch import Tensor

LONGEST = 1 << 24  # of queries or keys: a bit stands for a 64th of a row
SHORT = {2: 1024, 4: 0}  # bytes of a number: up to here a block of rows keeps all its scores in registers


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
    """Choose the forward kernel's blocks for q (…, N, D) and v (…, M, E), by shapes and dtype alone.

    The largest that ptxas keeps in registers for compute capabilities 8.0 and 9.0. Products of float32 run outside the
    tensor cores, where a strip of all keys spills: three passes over small blocks instead.
    """
    m, wide, size = v.shape[-2], max(q.shape[-1], v.shape[-1]) > 64, q.element_size()
    if m <= SHORT[size]:
        rows, keys = (32, 64) if m <= 512 else (16, 128)
        return Plan(rows, keys, chunks=-(-m // keys), group=1, warps=8 if wide or m > 256 else 4, stages=1)
    if size == 2:
        return Plan(64, 32, chunks=0, group=_blocks_of_a_bit(m, 32), warps=8 if wide else 4, stages=2)
    keys = 16 if wide else 32
    return Plan(16, keys, chunks=0, group=_blocks_of_a_bit(m, keys), warps=8 if wide else 4, stages=1)


def _blocks_of_a_bit(m: int, keys: int) -> int:
    """A word of 64 bits spans the row; two blocks of 32 at least, so that the backward's divide it."""
    return max(-(-m // (64 * keys)), 64 // keys)


def plan_backward(q: Tensor, v: Tensor) -> BackwardPlan:
    """Choose the backward kernels' blocks; the numbers of rows and keys divide what the forward's words speak of."""
    wide = max(q.shape[-1], v.shape[-1]) > 64
    if q.element_size() == 2:
        return BackwardPlan(64, 32, 32, 64, warps=8 if wide else 4, stages=1)
    keys = 16 if wide else 32
    return BackwardPlan(16, keys, 16, keys, warps=8 if wide else 4, stages=1)
