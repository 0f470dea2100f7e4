"""entmax attention tile by tile: forward and backward over slices of query rows, as torch operators.

A tile holds the scores of some query rows over all heads. The backward pass computes them anew and needs no search,
since the forward pass kept the threshold τ of every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import derivatives
from .entmax_autograd import working_dtype
from .kernels import cpu, triton
from .threshold import rows_from_threshold

TILE_ELEMENTS = 1 << 20  # scores in a tile over all heads: 4 MB in float32
DEVICE_TILE_ELEMENTS = 1 << 26


def masked_scores(q: Tensor, k: Tensor, attn_mask: Tensor | None, scale: float | Tensor) -> Tensor:
    """Scores scale · q·kᵀ with the mask applied; a NaN under a mask of −inf or False does not survive it."""
    scores = (q @ k.mT).mul_(scale) if not torch.is_grad_enabled() else q @ k.mT * scale
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -math.inf)
    attn_mask = attn_mask.to(scores.dtype)
    return torch.where(attn_mask == -math.inf, -math.inf, scores + attn_mask)


def query_tiles(q: Tensor, m: int) -> list[slice]:
    """Slices of query rows, so that a tile's scores over all leading dims stay within the bound."""
    bound = TILE_ELEMENTS if q.device.type == "cpu" else DEVICE_TILE_ELEMENTS
    rows = max(1, bound // max(1, math.prod(q.shape[:-2]) * m))
    return [slice(start, start + rows) for start in range(0, q.shape[-2], rows)]


def unexpanded(mask: Tensor | None) -> Tensor | None:
    """The mask with size 1 where it is broadcast, and two dims at least: what is computed from it stays as small."""
    if mask is None:
        return None
    mask = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    return mask[None] if mask.ndim == 1 else mask


def rows_of(mask: Any, rows: Any) -> Any:
    """Some query rows, a slice or indices, of a mask or of numbers per row that may have one row for all."""
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def without_hidden_keys(k: Tensor, v: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zero the keys that no query may see: 0 · NaN in the products would leak what the mask hides."""
    mask = unexpanded(attn_mask)
    if mask is None:
        return k, v
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    seen = seen.any(-2).unsqueeze(-1)
    return torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    alpha_rows: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    save: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (…, N, E), the threshold τ (…, N, 1) of every row, and with `save` what a kernel's backward reads.

    The rows of α and of the scale are (…, N, 1), or (…, 1, 1) where they hold one number for all rows of a head.
    """
    saved = _room_for_backward(q, k, v, alpha_rows, alpha, save)
    if triton.supports(q, k, v, alpha_rows, alpha):
        s_rows = None if scale_rows is None else scale_rows.expand(*q.shape[:-1], 1)
        return *triton.attention(q, k, v, attn_mask, s_rows, alpha, scale, saved if save else None), saved
    if cpu.supports(q, k, v, alpha_rows, alpha):
        found = cpu.attention(q, k, v, attn_mask, alpha_rows, scale_rows, alpha, scale, saved if save else None)
        if found is not None:
            return *found, saved
    work = working_dtype(q)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    tau = torch.empty(*q.shape[:-1], 1, dtype=work, device=q.device)
    k, v = without_hidden_keys(k.to(work), v.to(work), attn_mask)
    mask = unexpanded(attn_mask)
    for rows in query_tiles(q, k.shape[-2]):
        s = scale if scale_rows is None else rows_of(scale_rows, rows)
        scores = masked_scores(q[..., rows, :].to(work), k, rows_of(mask, rows), s)
        a_rows = None if alpha_rows is None else rows_of(alpha_rows, rows).expand(*scores.shape[:-1], 1)
        p, tau[..., rows, :] = torch.ops.selectivit.entmax(scores, alpha, a_rows)
        out[..., rows, :] = p @ v
    return out, tau, saved


forward_op = torch.library.custom_op("selectivit::entmax_attention", attention_forward, mutates_args=())


@forward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, a: Any, s: Any, alpha: float, scale: float, save: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    out, tau = q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((*q.shape[:-1], 1), dtype=working_dtype(q))
    return out, tau, _room_for_backward(q, k, v, a, alpha, save)


def _room_for_backward(q: Tensor, k: Tensor, v: Tensor, alpha_rows: Any, alpha: float, save: bool) -> Tensor:
    """A buffer for what a kernel keeps for its backward pass; empty where none serves or nothing is to be saved."""
    size = 0
    if save and triton.supports(q, k, v, alpha_rows, alpha):
        size = triton.saved_bytes(q, v)
    elif save and cpu.supports(q, k, v, alpha_rows, alpha):
        size = cpu.saved_bytes(q, k.shape[-2])
    return q.new_empty(size, dtype=torch.uint8)


def saved_for(saved: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """`saved` where it is laid out for tensors of these shapes, else None: vmap adds a dim that it does not know."""
    if saved is None or not saved.numel():
        return saved
    on_triton = triton.supports(q, k, v, None, 1.5)
    size = triton.saved_bytes(q, v) if on_triton else cpu.saved_bytes(q, k.shape[-2])
    return saved if saved.numel() == size else None


def attention_backward(
    grad: Tensor,
    tau: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    alpha_rows: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    needs: Sequence[bool],
    saved: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, and of the mask, α's rows and the scale's rows where the three `needs` say so."""
    of_mask, of_alpha, of_scale = needs
    if not of_mask and saved is not None:
        if triton.supports(q, k, v, alpha_rows, alpha) and saved.numel():
            return _gradients_on_triton(grad, q, k, v, attn_mask, scale_rows, alpha, scale, saved, of_scale)
        found = None
        if cpu.supports(q, k, v, alpha_rows, alpha):
            numbers = (alpha, scale, saved, of_alpha, of_scale)
            found = cpu.attention_gradients(grad, q, k, v, attn_mask, alpha_rows, scale_rows, *numbers)
        if found is not None:
            return *found[:3], None, *found[3:]
    work = working_dtype(q)
    wide_k, wide_v = without_hidden_keys(k.to(work), v.to(work), attn_mask)
    dq, dk, dv = (torch.zeros(t.shape, dtype=work, device=q.device) for t in (q, k, v))
    dmask, da, ds = (None if t is None else t.zero_() for t in _optional_gradients(q, k, alpha_rows, scale_rows, needs))
    mask = unexpanded(attn_mask)
    for rows in query_tiles(q, k.shape[-2]) if k.shape[-2] else ():
        s = scale if scale_rows is None else rows_of(scale_rows, rows)
        wide_q, wide_grad = q[..., rows, :].to(work), grad[..., rows, :].to(work)
        scores = masked_scores(wide_q, wide_k, rows_of(mask, rows), s)
        shape, m = scores.shape, scores.shape[-1]
        a = alpha if alpha_rows is None else rows_of(alpha_rows, rows).expand(*shape[:-1], 1).reshape(-1, 1)
        p = rows_from_threshold(scores.view(-1, m), tau[..., rows, :].reshape(-1, 1), a)
        dp = (wide_grad @ wide_v.mT).view(-1, m)
        dscores = derivatives.jacobian_product(p, a, dp).view(shape)
        dv += p.view(shape).mT @ wide_grad
        if da is not None:
            _add_rows(da, rows, (dp * derivatives.alpha_derivative(p, a)).sum(-1).view(*shape[:-1], 1))
        if dmask is not None:
            dmask[..., rows, :] = dscores
        if ds is not None:
            _add_rows(ds, rows, (dscores * (wide_q @ wide_k.mT)).sum(-1, keepdim=True))
        dscores = dscores * s
        dq[..., rows, :] = dscores @ wide_k
        dk += dscores.mT @ wide_q
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask, da, ds


def _gradients_on_triton(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    saved: Tensor,
    of_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, None, None, Tensor | None]:
    s_rows = None if scale_rows is None else scale_rows.expand(*q.shape[:-1], 1)
    dq, dk, dv, ds = triton.attention_gradients(grad, q, k, v, mask, s_rows, alpha, scale, saved)
    if scale_rows is None or ds is None or not of_scale:
        return dq, dk, dv, None, None, None
    return dq, dk, dv, None, None, ds if scale_rows.shape[-2] > 1 else ds.sum(-2, keepdim=True)


@torch.library.custom_op("selectivit::entmax_attention_backward", mutates_args=())
def backward_op(
    grad: Tensor,
    tau: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    alpha_rows: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    needs: Sequence[bool],
    saved: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`attention_backward` as an operator, which returns tensors alone: what is not asked for is empty."""
    found = attention_backward(grad, tau, q, k, v, attn_mask, alpha_rows, scale_rows, alpha, scale, needs, saved)
    dq, dk, dv, *optional = found
    dmask, da, ds = (q.new_empty(0, dtype=working_dtype(q)) if t is None else t for t in optional)
    return dq, dk, dv, dmask, da, ds


@backward_op.register_fake
def _(
    grad: Any,
    tau: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    a: Any,
    s: Any,
    alpha: Any,
    scale: Any,
    needs: Any,
    saved: Any = None,
):
    empty = q.new_empty(0, dtype=working_dtype(q))
    dmask, da, ds = (empty.clone() if t is None else t for t in _optional_gradients(q, k, a, s, needs))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dmask, da, ds


def _add_rows(total: Tensor, rows: slice, found: Tensor) -> None:
    """Put a tile's gradients per row in their place, or add them up where one value serves all rows."""
    if total.shape[-2] == 1:
        total += found.sum(-2, keepdim=True)
    else:
        total[..., rows, :] = found


def _optional_gradients(
    q: Tensor, k: Tensor, alpha_rows: Tensor | None, scale_rows: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Room for the gradients of mask, α and scale, in the working dtype; None where none is asked for."""
    work = working_dtype(q)
    whole = (*q.shape[:-1], k.shape[-2])
    shapes = (whole, None if alpha_rows is None else alpha_rows.shape, None if scale_rows is None else scale_rows.shape)
    dmask, da, ds = (
        q.new_empty(shape, dtype=work) if need and shape is not None else None
        for shape, need in zip(shapes, needs, strict=True)
    )
    return dmask, da, ds
