"""entmax attention over tiles of query rows: the (N, M) matrix of scores never exists as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from .entmax import check_alpha, entmax, working_dtype
from .tiles import attention_backward, attention_forward, masked_scores, without_hidden_keys


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
        alpha: number ≥ 1, or a tensor that broadcasts to (B, H, N, 1), e.g. (H, 1, 1); learnable.
        attn_mask: bool, True = may attend, or floating and added to the scores; broadcast to (B, H, N, M).
        scale: factor on q·k; None is 1/√D. A tensor broadcasts to (B, H, N, 1) and is learnable.

    Returns:
        (B, H, N, E) in q's dtype. A query whose keys are all masked gives zeros and zero gradients.

    Raises:
        ValueError: shapes that do not fit each other, or alpha out of range.
        TypeError: dtypes that differ or are not floating.

    Example:
        >>> q = k = v = torch.randn(1, 6, 197, 64)
        >>> entmax_attention(q, k, v, alpha=1.5).shape
        torch.Size([1, 6, 197, 64])

    Source: entmax in every layer of a ViT, arXiv 2605.23868; in frozen CLIP, arXiv 2607.07135.
    """
    lead = check_attention_inputs(q, k, v, attn_mask)
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    work, rows = working_dtype(q), (*lead, q.shape[-2], 1)
    a, a_rows = (0.0, alpha.to(work).expand(rows)) if isinstance(alpha, Tensor) else (check_alpha(alpha), None)
    if isinstance(scale, Tensor):
        s, s_rows = 1.0, scale.to(work).expand(rows)
    else:
        s, s_rows = float(q.shape[-1]) ** -0.5 if scale is None else float(scale), None
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*lead, q.shape[-2], k.shape[-2])
    tensors = (q, k, v, attn_mask, a_rows, s_rows)
    transforms = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not (save or transforms or forward_ad._current_level >= 0):
        attend: Callable[..., Any] = attention_forward if _at_hand(q, k, v) else torch.ops.selectivit.entmax_attention
        return attend(*tensors, a, s)[0]
    function = _TiledAttentionFunctorch if transforms else _TiledAttention
    return function.apply(*tensors, a, s, save)[0]


def check_attention_inputs(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> torch.Size:
    """Raise a ValueError or TypeError that names what does not fit; return the leading dims they broadcast to."""
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"attention expects q (…, N, D), k (…, M, D), v (…, M, E) with equal D and M, got {_shapes(q, k, v)}"
        )
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
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool (True = may attend) or floating (added), got {attn_mask.dtype}")
    padded = (1,) * (len(full) - attn_mask.ndim) + tuple(attn_mask.shape)
    if len(padded) != len(full) or any(m not in (1, f) for m, f in zip(padded, full, strict=True)):
        raise ValueError(f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to (…, N, M) = {full}")
    return lead


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _at_hand(*tensors: Tensor) -> bool:
    """Whether nothing traces or wraps the tensors, so that the operator's dispatch (20 µs) may be left out."""
    return (
        not torch.compiler.is_compiling()
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


class _TiledAttention(torch.autograd.Function):
    """First derivatives by the tiled closed form; second ones through the whole matrix, which is said and correct."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, alpha_rows: Any, scale_rows: Any, alpha: Any, scale: Any, save: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        attend: Callable[..., Any] = attention_forward if _at_hand(q, k, v) else torch.ops.selectivit.entmax_attention
        return attend(q, k, v, mask, alpha_rows, scale_rows, alpha, scale, save)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, ctx.alpha, ctx.scale, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sigma, saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (*_differentiable_backward(tensors, ctx.alpha, ctx.scale, needs, grads[0]), None, None, None)
        plain = _at_hand(grads[0], *tensors[:3])
        backward: Callable[..., Any] = attention_backward if plain else torch.ops.selectivit.entmax_attention_backward
        found = backward(grads[0], sigma, *tensors, ctx.alpha, ctx.scale, bool(needs[3]), saved)
        dmask = found[3].to(tensors[3].dtype) if needs[3] else None
        wanted = (*found[:3], dmask, *found[4:])
        return (*(g if need else None for g, need in zip(wanted, needs[:6], strict=True)), None, None, None)


class _TiledAttentionFunctorch(_TiledAttention):
    """The same with vmap: one more leading dim."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        *tensors, alpha, scale, save = inputs
        dims = in_dims[:6]
        front = [
            None if t is None else t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, dims, strict=True)
        ]
        return _TiledAttentionFunctorch.apply(*front, alpha, scale, save), (0, 0, None)


def _differentiable_backward(tensors: list[Any], alpha: float, scale: float, needs: Any, grad: Tensor) -> list[Any]:
    """Gradients that can be differentiated again, from the composed attention with its whole matrix."""
    q, k, v, attn_mask, alpha_rows, scale_rows = tensors
    work = working_dtype(q)
    with torch.enable_grad():
        s = scale if scale_rows is None else scale_rows
        hidden_k, hidden_v = without_hidden_keys(k.to(work), v.to(work), attn_mask)
        scores = masked_scores(q.to(work), hidden_k, attn_mask, s)
        out = (entmax(scores, alpha if alpha_rows is None else alpha_rows) @ hidden_v).to(q.dtype)
        wanted = [t for t, need in zip(tensors, needs[:6], strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs[:6]]
