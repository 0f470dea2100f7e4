"""entmax attention over tiles of query rows: the (N, M) matrix of scores never exists as a whole."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .attention_autograd import attend_in_tiles
from .entmax import check_alpha
from .entmax_autograd import working_dtype
from .graph import attention_graph, wants_plain_operators


def entmax_attention(
    q: Float[Tensor, "*#lead n d"],
    k: Float[Tensor, "*#lead m d"],
    v: Float[Tensor, "*#lead m e"],
    *,
    alpha: float | Tensor = 1.5,
    attn_mask: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Float[Tensor, "*#lead n e"]:
    """Attention with α-entmax in place of softmax, as `scaled_dot_product_attention` is called.

    Memory beyond inputs and output is one tile of query rows, forward and backward. Scores, threshold and gradients
    are computed in float32 (float64 for float64 inputs); the scale meets the scores there, not a rounded q.

    Args:
        q: (B, H, N, D); any number of leading dims.
        k: (B, H, M, D).
        v: (B, H, M, E).
        alpha: number ≥ 1, or a tensor that broadcasts to (B, H, N, 1), e.g. (H, 1, 1) for one per head; learnable.
        attn_mask: bool, True = may attend, or floating and added to the scores; broadcast to (B, H, N, M). Causal
            attention is `torch.ones(N, M, dtype=torch.bool).tril()`.
        scale: factor on q·k; None is 1/√D. A tensor broadcasts to (B, H, N, 1) and is learnable.

    Returns:
        (B, H, N, E) in q's dtype. A query whose keys are all masked gives zeros and zero gradients.

    Raises:
        ValueError: shapes or devices that do not fit each other, or alpha out of range.
        TypeError: dtypes that differ or are not floating; an alpha, scale or mask that is no number or tensor.

    Example:
        >>> q = k = v = torch.randn(1, 6, 197, 64)
        >>> entmax_attention(q, k, v, alpha=1.5).shape
        torch.Size([1, 6, 197, 64])

    Source: entmax in every layer of a ViT, arXiv 2605.23868; in frozen CLIP, arXiv 2607.07135.
    """
    q, k, v = as_autocast_would(q, k, v)
    lead = check_attention_inputs(q, k, v, attn_mask)
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    if torch.compiler.is_compiling():  # its tracer takes no tensor twice, as the q and k of qq scores are
        k, v = k.view_as(k) if k is q else k, v.view_as(v) if v is q or v is k else v
    work, rows = working_dtype(q), (*lead, q.shape[-2], 1)
    if isinstance(alpha, Tensor):
        a, a_rows = 0.0, _expanded_rows(alpha, "alpha", rows, work, q.device)
    else:
        a, a_rows = check_alpha(_number(alpha, "alpha")), None
    if isinstance(scale, Tensor):
        s, s_rows = 1.0, _expanded_rows(scale, "scale", rows, work, q.device)
    else:
        s, s_rows = float(q.shape[-1]) ** -0.5 if scale is None else _number(scale, "scale"), None
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*lead, q.shape[-2], k.shape[-2])
    if wants_plain_operators():
        with without_autocast(q):
            return attention_graph(q, k, v, attn_mask, a if a_rows is None else a_rows, s if s_rows is None else s_rows)
    with without_autocast(q):
        return attend_in_tiles(q, k, v, attn_mask, a_rows, s_rows, a, s)


def as_autocast_would(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v as autocast, where it is enabled, does for `scaled_dot_product_attention`."""
    kind = q.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v


def without_autocast(q: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which the products that are written in float32 are computed in float32."""
    kind = q.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a tensor, got {value!r}") from None


def _expanded_rows(value: Tensor, name: str, rows: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One number for every row, as (…, N, 1); or one for all rows of a head, as (…, 1, 1)."""
    padded = (1,) * (len(rows) - value.ndim) + tuple(value.shape)
    if len(padded) != len(rows) or any(p not in (1, r) for p, r in zip(padded, rows, strict=True)):
        raise ValueError(_row_shape_text(value, name, rows))
    if value.device != device:
        if value.ndim:
            raise ValueError(f"{name} is on {value.device}, q on {device}: move it with .to({str(device)!r})")
        value = value.to(device)  # one number may come from anywhere, as in torch's own operations
    return value.to(dtype).expand(*rows[:-2], padded[-2], 1)


def _row_shape_text(value: Tensor, name: str, rows: tuple[int, ...]) -> str:
    shape, heads = tuple(value.shape), rows[-3] if len(rows) > 2 else None
    text = f"{name} of shape {shape} does not broadcast to (…, N, 1) = {rows}; one per head is (H, 1, 1)"
    if heads is not None and shape == (heads,):
        return f"{text}: pass {name}.view({heads}, 1, 1), or {name}[:, None, None]"
    if heads is not None and len(rows) > 3 and shape == (rows[-4], heads):
        return f"{text}, one per batch element and head (B, H, 1, 1): pass {name}[:, :, None, None]"
    return text


def check_attention_inputs(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> torch.Size:
    """Raise a ValueError or TypeError that names what does not fit; return the leading dims they broadcast to."""
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"attention expects q (…, N, D), k (…, M, D), v (…, M, E) with equal D and M, got {_shapes(q, k, v)}"
        )
    if q.shape[-1] == 0:
        raise ValueError(f"attention expects heads at least one wide (D >= 1), got {_shapes(q, k, v)}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise TypeError(f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    lead = q.shape[:-2]
    if not lead == k.shape[:-2] == v.shape[:-2]:
        try:
            lead = torch.broadcast_shapes(lead, k.shape[:-2], v.shape[:-2])
        except RuntimeError:
            text = f"the leading (batch, head) dims of q, k and v do not broadcast: {_shapes(q, k, v)}"
            raise ValueError(text) from None
    if attn_mask is None:
        return lead
    full = (*lead, q.shape[-2], k.shape[-2])
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None, got {type(attn_mask).__name__}")
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask is on {attn_mask.device}, q on {q.device}: move it with .to({str(q.device)!r})")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool (True = may attend) or floating (added), got {attn_mask.dtype}")
    padded = (1,) * (len(full) - attn_mask.ndim) + tuple(attn_mask.shape)
    if len(padded) != len(full) or any(m not in (1, f) for m, f in zip(padded, full, strict=True)):
        raise ValueError(f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to (…, N, M) = {full}")
    return lead


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
