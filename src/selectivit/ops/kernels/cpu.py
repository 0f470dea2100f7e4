"""The compiled CPU kernel's calls: what it covers (`supports`), attention forward and backward, rows of entmax.

library.py loads it and chooses; what it does not cover goes to the pure-PyTorch path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import folded_mask, four_dims
from .library import available, done, names, resolved, status, threads, using
from .structs import ATTENTION, GRADIENTS, ROWS

__all__ = [
    "attention",
    "attention_gradients",
    "available",
    "entmax_rows",
    "names",
    "saved_bytes",
    "status",
    "supports",
    "supports_rows",
    "using",
]

LEAST_ALPHA = 1.05  # below, u^(1/(α−1)) magnifies float32's rounding beyond the accuracy promised
LARGEST_WIDTH = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(q: Tensor, k: Tensor, v: Tensor, alpha_rows: Tensor | None, alpha: float) -> bool:
    """Whether the library computes this attention: on CPU, heads of width 256 or less, α within [1.05, 2].

    By shapes and dtypes alone, and so the same for a graph that is traced: of an α per head the values are looked at
    in the call, which declines where any lies outside.

    Args:
        q: (…, N, D).
        k: (…, M, D).
        v: (…, M, E).
        alpha_rows: None, (…, 1, 1), or (…, N, 1) which is not covered.
        alpha: the number for all heads where there are no alpha_rows.
    """
    return (
        q.device.type == "cpu"
        and q.dtype in DTYPES
        and (LEAST_ALPHA <= alpha <= 2 if alpha_rows is None else alpha_rows.shape[-2] == 1)
        and q.shape[-1] <= LARGEST_WIDTH
        and v.shape[-1] <= LARGEST_WIDTH
        and k.shape[-2] < 2**31 - 64
        and 0 not in q.shape
        and 0 not in v.shape
        and available()
    )


def saved_bytes(q: Tensor, m: int) -> int:
    """Room for the survivors of every row, as the library lays it out (saved.h): a function of the shapes alone."""
    heads = q.numel() // (q.shape[-2] * q.shape[-1])
    rows = _unit_rows(q.shape[-2])
    units = (q.shape[-2] + rows - 1) // rows
    part = 2 if m <= 512 else 4 if m <= 2048 else 8
    share, least = (m + part - 1) // part, m if m < 48 else 48
    capacity = share if share > least else least
    return heads * units * (((rows + 1) * 8 + rows * capacity * 8 + 63) // 64 * 64)


def _unit_rows(n: int) -> int:
    pieces = (n + 127) // 128
    rows = (n + pieces - 1) // pieces
    return (rows + 15) // 16 * 16


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    alpha_rows: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    saved: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Run the forward pass.

    Args:
        q: (…, N, D), as `supports` says.
        k: (…, M, D).
        v: (…, M, E).
        attn_mask: bool or floating, expanded to (…, N, M).
        alpha_rows: (…, 1, 1) or None.
        scale_rows: (…, N, 1), (…, 1, 1) or None.
        alpha: in [1.05, 2], where there are no alpha_rows.
        scale: factor on q·k where there are no scale_rows.
        saved: uint8 of `saved_bytes`, filled with the survivors; None where no backward pass follows.

    Returns:
        The output (…, N, E) and τ (…, N, 1); None where q or k hold NaN or infinity, or α_rows a value outside
        [1.05, 2]: the other path has the policy.
    """
    library, which, screen = resolved()
    lead, n, e = q.shape[:-2], q.shape[-2], v.shape[-1]
    wide_v = _rows(v)
    out = torch.empty((*lead, n, wide_v.shape[-1]), dtype=torch.float32)
    tau = torch.empty((*lead, n, 1), dtype=torch.float32)
    mask, alphas, scales = _mask(attn_mask), _values(alpha_rows), _values(scale_rows)
    inputs = (_rows(q), _rows(k), wide_v, mask, alphas, scales)  # held until the call is over
    problem = _packed(*inputs, saved, alpha, scale, screen, out.data_ptr(), tau.data_ptr())
    if not done(library.selectivit_forward(problem, which)):
        return None
    return _narrow(out, e, q.dtype), tau


def attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    alpha_rows: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    saved: Tensor,
    of_alpha: bool = False,
    of_scale: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None:
    """Run the backward pass over the saved survivors; rows without are searched again.

    Returns:
        Gradients of q, k and v in their dtype, and of alpha_rows and scale_rows where asked for, shaped like them;
        None as in `attention`.
    """
    library, which, screen = resolved()
    lead, n, m = q.shape[:-2], q.shape[-2], k.shape[-2]
    wide_q, wide_v, g = _rows(q), _rows(v), _rows(grad)
    mask, alphas, scales = _mask(attn_mask), _values(alpha_rows), _values(scale_rows)
    inputs = (wide_q, _rows(k), wide_v, mask, alphas, scales)  # held until the call is over
    problem = _packed(*inputs, saved if saved.numel() else None, alpha, scale, screen, 0, 0)
    d, e = wide_q.shape[-1], wide_v.shape[-1]
    dq = torch.empty((*lead, n, d), dtype=torch.float32)
    dk = torch.empty((*lead, m, d), dtype=torch.float32)
    dv = torch.empty((*lead, m, e), dtype=torch.float32)
    da = torch.empty((*lead, n, 1), dtype=torch.float32) if of_alpha else None
    ds = torch.empty((*lead, n, 1), dtype=torch.float32) if of_scale else None
    places = (dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), _address(da), _address(ds))
    if not done(library.selectivit_backward(problem, GRADIENTS.pack(g.data_ptr(), *g.stride()[:3], *places), which)):
        return None
    return (
        _narrow(dq, q.shape[-1], q.dtype),
        _narrow(dk, q.shape[-1], k.dtype),
        _narrow(dv, v.shape[-1], v.dtype),
        None if da is None or alpha_rows is None else _summed_like(da, alpha_rows),
        None if ds is None or scale_rows is None else _summed_like(ds, scale_rows),
    )


def supports_rows(scores: Tensor, alpha: float) -> bool:
    """Whether the library normalises these rows: on CPU, not float64, α within [1.05, 2]."""
    on_cpu = scores.device.type == "cpu" and scores.dtype in DTYPES
    return on_cpu and LEAST_ALPHA <= alpha <= 2 and scores.shape[-1] < 2**31 - 64 and available()


def entmax_rows(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Normalise rows.

    Args:
        scores: (R, N) float32, R and N ≥ 1.
        alpha: in [1.05, 2].

    Returns:
        p (R, N) and τ (R, 1).
    """
    library, which, _ = resolved()
    if scores.stride(-1) != 1:
        scores = scores.contiguous()
    p, tau = torch.empty(scores.shape), torch.empty(scores.shape[0], 1)
    rows, n = scores.shape
    places = (scores.data_ptr(), p.data_ptr(), tau.data_ptr())
    done(library.selectivit_entmax_rows(ROWS.pack(*places, rows, n, scores.stride(0), alpha, threads()), which))
    return p, tau


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    alphas: Tensor | None,
    scales: Tensor | None,
    saved: Tensor | None,
    alpha: float,
    scale: float,
    screen: bool,
    out: int,
    tau_out: int,
) -> bytes:
    """The struct of csrc/problem.h."""
    batch, heads, n, d = q.shape
    m, e = v.shape[2:]
    scale_strides = (0, 0, 0) if scales is None else scales.stride()[:3]
    if scales is not None and scales.shape[2] == 1:
        scale_strides = (*scale_strides[:2], 0)
    return ATTENTION.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        _address(mask),
        _address(scales),
        _address(alphas),
        out,
        tau_out,
        _address(saved),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0, 0, 0) if mask is None else mask.stride()),
        *scale_strides,
        *((0, 0) if alphas is None else alphas.stride()[:2]),
        *(batch, heads, n, m, d, e),
        0 if saved is None else saved.numel(),
        scale,
        alpha,
        0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        screen,
        threads(),
    )


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _narrow(t: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The columns that were asked for, in the caller's dtype, contiguous."""
    if t.shape[-1] != width:
        t = t[..., :width].contiguous()
    return t if t.dtype == dtype else t.to(dtype)


def _summed_like(rows: Tensor, values: Tensor) -> Tensor:
    """The rows' shares of a gradient, summed where one value serves all rows: within a head and thus in one order."""
    return rows.sum(-2, keepdim=True) if values.shape[-2] == 1 else rows


def _values(t: Tensor | None) -> Tensor | None:
    """Numbers per row or head: float32, four dims."""
    return None if t is None else four_dims(t.float())


def _rows(t: Tensor) -> Tensor:
    """Float32, four dims, the last one contiguous and a multiple of 16 wide (by zeros, which change nothing)."""
    if t.dtype != torch.float32 or t.is_neg():  # a view that torch negates when it reads it
        t = t.float().resolve_neg()
    if t.ndim != 4:
        t = four_dims(t)
    if t.shape[-1] % 16:
        t = torch.nn.functional.pad(t, (0, -t.shape[-1] % 16))  # in the order of t's dims in memory
    return t if t.stride(-1) == 1 else t.contiguous()


def _mask(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else folded_mask(mask, _readable_mask)


def _readable_mask(mask: Tensor) -> Tensor:
    """Bool or float32, the last dim contiguous."""
    mask = mask if mask.dtype in (torch.bool, torch.float32) else mask.float()
    mask = mask.resolve_neg()
    return mask if mask.shape[-1] == 1 or mask.stride(-1) == 1 else mask.contiguous()
