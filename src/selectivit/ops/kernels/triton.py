"""The Triton kernels: offered for CUDA tensors, chosen per call, imported when first used.

What they do not cover goes to the pure-PyTorch path: `supports`. Block shapes come from a small table (triton_plan.py);
nothing is tuned at run time. Their speed has not been measured: docs/triton.md.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .layout import folded_mask, four_dims
from .triton_plan import LONGEST, BackwardPlan, Plan, padded, plan_backward, plan_forward

LARGEST_WIDTH = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEAR_SOFTMAX = 0.05  # as in ops/threshold.py
LARGEST_POWER = 10
CHOICES = ("on", "on tf32x3", "off", "interpreter")

_from_environment = os.environ.get("SELECTIVIT_TRITON") or "on"
_inside_using: ContextVar[str | None] = ContextVar("selectivit_triton", default=None)


def _choice() -> str:
    choice = _inside_using.get() or _from_environment
    if choice not in CHOICES:
        raise ValueError(f"SELECTIVIT_TRITON is {choice!r}: use one of {', '.join(CHOICES)}")
    return choice


@contextlib.contextmanager
def using(choice: str) -> Iterator[None]:
    """Switch the Triton kernels inside the block, for tests and measurements; also $SELECTIVIT_TRITON.

    Args:
        choice: "on" for CUDA tensors, "on tf32x3" with products of float32 made of three TF32 ones on the tensor
            cores, "off" for pure PyTorch, "interpreter" for CPU tensors too, which Triton's
            interpreter runs (slowly) where TRITON_INTERPRET=1 was set before the kernels were first used.

    Yields:
        Nothing.

    Raises:
        ValueError: no such choice.
    """
    if choice not in CHOICES:
        raise ValueError(f"no choice {choice!r} of Triton kernels: use one of {', '.join(CHOICES)}")
    token = _inside_using.set(choice)
    try:
        yield
    finally:
        _inside_using.reset(token)


def status() -> str:
    """Say whether the Triton kernels serve, or why they do not.

    Returns:
        One line for `selectivit doctor`.

    Example:
        >>> with using("off"):
        ...     status()
        'switched off: the pure-PyTorch path serves'
    """
    if _choice() == "off":
        return "switched off: the pure-PyTorch path serves"
    if _choice() == "interpreter":
        return "in Triton's interpreter, for tests: slow"
    if not torch.cuda.is_available():
        return f"none ({_missing() or 'no CUDA card'}): the pure-PyTorch path serves"
    reasons = {i: _missing() or _too_old(i) for i in range(torch.cuda.device_count())}
    serving = [f"cuda:{i}" for i, why in reasons.items() if not why]
    if serving:
        return f"serves {', '.join(serving)} (compiled when first used)"
    return f"none ({next(iter(reasons.values()))}): the pure-PyTorch path serves"


@functools.cache
def _missing() -> str:
    """Why no card can be served, or nothing."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None:
        return "not tried on AMD cards"
    return ""


@functools.cache
def _too_old(index: int) -> str:
    if not torch.cuda.is_available():  # tensors without data may be on a card that is not there
        return "no CUDA card"
    major, minor = torch.cuda.get_device_capability(index)
    return "" if major >= 8 else f"cuda:{index} has compute capability {major}.{minor}, below 8.0"


def supports(q: Tensor, k: Tensor, v: Tensor, alpha_rows: Tensor | None, alpha: float) -> bool:
    """Whether the kernels compute this attention: on CUDA, one α within (1, 2], heads of width 128 or less."""
    return (
        _serves(q.device)
        and q.dtype in DTYPES
        and alpha_rows is None
        and 1 < alpha <= 2
        and max(q.shape[-1], v.shape[-1]) <= LARGEST_WIDTH
        and max(q.shape[-2], k.shape[-2]) <= LONGEST
        and min(*q.shape, *k.shape, *v.shape) > 0
    )


def _serves(device: torch.device) -> bool:
    if device.type == "cpu":
        return _choice() == "interpreter"
    if device.type != "cuda" or _choice() == "off":
        return False
    return not (_missing() or _too_old(torch.cuda.current_device() if device.index is None else device.index))


def saved_bytes(q: Tensor, v: Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass: a function of the shapes alone.

    O₂ as the output, two numbers a row, and for long rows a word for every block of queries.
    """
    return sum(_layout(q, v, plan_forward(q, v)))


def _layout(q: Tensor, v: Tensor, plan: Plan) -> tuple[int, int, int, int]:
    """Bytes of the words, the maxima, the shifts and O₂; each starts at a multiple of 16, for wide loads."""
    rows = q.numel() // q.shape[-1]
    words = 0 if plan.chunks else (rows // q.shape[-2]) * plan.blocks(q.shape[-2])
    row = -(-rows // 4) * 16
    return -(-words // 2) * 16, row, row, rows * v.shape[-1] * q.element_size()


def _parts(saved: Tensor, q: Tensor, v: Tensor, plan: Plan) -> list[Tensor]:
    """`saved` as words, maxima, shifts and O₂."""
    parts = saved.split(_layout(q, v, plan))
    return [t.view(d) for t, d in zip(parts, (torch.int64, torch.float32, torch.float32, q.dtype), strict=True)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    saved: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the forward pass.

    Args:
        q: (…, N, D), as `supports` says; any strides.
        k: (…, M, D).
        v: (…, M, E).
        attn_mask: bool or floating, expanded to (…, N, M).
        scale_rows: (…, N, 1) or None.
        alpha: in (1, 2].
        scale: factor on q·k where there are no scale_rows.
        saved: uint8 of `saved_bytes`, filled for the backward pass; None where none follows.

    Returns:
        The output (…, N, E) and τ (…, N, 1).
    """
    from . import triton_forward

    plan, call = plan_forward(q, v), _Call(q, k, v, attn_mask, scale_rows, alpha, scale)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    tau = torch.empty(*q.shape[:-1], 1, dtype=torch.float32, device=q.device)
    words, tops, shifts, out2 = (tau,) * 4 if saved is None else _parts(saved, q, v, plan)
    kernel: Any = triton_forward.strip_forward if plan.chunks else triton_forward.long_forward
    blocks = plan.blocks(call.n)
    with _on(q.device):
        kernel[(call.heads * call.batch * blocks,)](
            *call.inputs, out, tau, out2, tops, shifts, words, *call.input_strides, *call.other_strides,
            call.heads, call.n, call.m, blocks, call.scale, call.eps,
            **call.constants, ROWS=plan.rows, KEYS=plan.keys, CHUNKS=plan.chunks, GROUP=plan.group,
            SAVE=saved is not None, num_warps=call.warps(plan), num_stages=plan.stages,
        )  # fmt: skip
    return out, tau


def attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run the backward pass on what `attention` saved.

    Returns:
        Gradients of q, k and v in their dtype, and of the scale's rows (…, N, 1) where there are such.
    """
    from . import triton_backward

    forward, plan = plan_forward(q, v), plan_backward(q, v)
    call = _Call(q, k, v, attn_mask, scale_rows, alpha, scale)
    words, tops, shifts, out2 = _parts(saved, q, v, forward)
    g = four_dims(grad)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    deltas = torch.empty_like(tops)
    dscale = None if scale_rows is None else torch.empty(*q.shape[:-1], 1, dtype=torch.float32, device=q.device)
    live = not forward.chunks
    shared = {**call.constants, "LIVE": live, "num_warps": call.warps(plan), "num_stages": plan.stages}
    strides = (*call.input_strides, *g.stride(), *call.other_strides)
    rows, keys, bit = plan.query_rows, plan.query_keys, forward.group * forward.keys
    blocks = -(-call.n // rows)
    with _on(q.device):
        kernel: Any = triton_backward.queries_backward
        kernel[(call.heads * call.batch * blocks,)](
            *call.inputs, g, out2, tops, shifts, words, deltas, dq, deltas if dscale is None else dscale, *strides,
            call.heads, call.n, call.m, blocks, call.scale, call.eps,
            ROWS=rows, KEYS=keys, PIECES=bit // keys, **shared,
        )  # fmt: skip
        blocks = -(-call.m // plan.key_keys)
        reach = -(-forward.blocks(call.n) // 64)
        kernel = triton_backward.keys_backward
        kernel[(call.heads * call.batch * blocks,)](
            *call.inputs, g, tops, shifts, words, deltas, dk, dv, *strides,
            call.heads, call.n, call.m, blocks, forward.blocks(call.n), bit, call.scale, call.eps,
            ROWS=plan.key_rows, KEYS=plan.key_keys, REACH=reach, PIECES=reach * forward.rows // plan.key_rows, **shared,
        )  # fmt: skip
    return dq, dk, dv, dscale


class _Call:
    """What every kernel of one attention is called with."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        scale_rows: Tensor | None,
        alpha: float,
        scale: float,
    ) -> None:
        q, k, v = (four_dims(t) for t in (q, k, v))
        mask = q if attn_mask is None else folded_mask(attn_mask, _readable_mask)
        scales = q if scale_rows is None else four_dims(scale_rows)
        self.inputs = (q, k, v, mask, scales)
        self.input_strides = (*q.stride(), *k.stride(), *v.stride())
        self.other_strides = (*mask.stride(), *scales.stride()[:3])
        self.batch, self.heads, self.n, d = q.shape
        self.m, e = v.shape[-2:]
        self.scale, self.eps = scale, alpha - 1
        self.constants = {
            "D": d,
            "E": e,
            "D_PAD": padded(d),
            "E_PAD": padded(e),
            "POWER": _power(alpha - 1),
            "KIND": 0 if attn_mask is None else 1 if mask.dtype == torch.uint8 else 2,
            "HAS_SCALES": scale_rows is not None,
            "PRECISION": _precision(q.dtype),
        }

    def warps(self, plan: Plan | BackwardPlan) -> int:
        """The plan's; with a mask 8, whose addresses would not fit into the registers of 4 on older cards."""
        return 8 if self.constants["KIND"] else plan.warps


def _power(eps: float) -> int:
    """The kernels' POWER: β where it is a small integer, −1 close to softmax, 0 else."""
    near = round(1 / eps)
    if eps < NEAR_SOFTMAX:
        return -1
    return near if near <= LARGEST_POWER and abs(1 / eps - near) <= 1e-9 * near else 0


def _precision(dtype: torch.dtype) -> str:
    """Products of float32 are rounded to TF32 only where torch's own may be."""
    if dtype == torch.float32 and _choice() == "on tf32x3":
        return "tf32x3"
    rounded = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if rounded else "ieee"


def _readable_mask(mask: Tensor) -> Tensor:
    """Bool as bytes, or a float that Triton knows."""
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8)
    return mask if mask.dtype in DTYPES else mask.float()


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
