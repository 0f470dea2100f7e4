"""Slow and obvious: what the fast paths are tested against. Float64, by bisection, with whole matrices."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def entmax_reference(scores: Float[Tensor, "*shape"], alpha: float = 1.5, dim: int = -1) -> Float[Tensor, "*shape"]:
    """α-entmax by 400 bisections of the threshold, in float64.

    Args:
        scores: any shape; −inf masks.
        alpha: number ≥ 1.
        dim: the dimension that sums to 1.

    Returns:
        float64 probabilities of the scores' shape.

    Example:
        >>> entmax_reference(torch.tensor([0.0, 0.5, 1.0]), 2.0)
        tensor([0.0000, 0.2500, 0.7500], dtype=torch.float64)
    """
    x = scores.double().movedim(dim, -1)
    if x.shape[-1] == 0:
        return x.movedim(-1, dim)
    masked = (x == -math.inf).all(-1, keepdim=True)
    if alpha == 1:
        return torch.where(masked, 0.0, x.softmax(-1)).movedim(-1, dim)
    z = (alpha - 1) * (x - torch.where(masked, 0.0, x.amax(-1, keepdim=True)))
    low, high = torch.full_like(z[..., :1], -1.0), torch.zeros_like(z[..., :1])
    for _ in range(400):
        tau = (low + high) / 2
        too_much = (z - tau).clamp_min(0).pow(1 / (alpha - 1)).sum(-1, keepdim=True) > 1
        low, high = torch.where(too_much, tau, low), torch.where(too_much, high, tau)
    p = (z - low).clamp_min(0).pow(1 / (alpha - 1))
    return torch.where(masked, 0.0, p / p.sum(-1, keepdim=True)).movedim(-1, dim)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, alpha: float = 1.5, attn_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention with α-entmax and the whole (…, N, M) matrix in float64.

    Args:
        q: (…, N, D).
        k: (…, M, D).
        v: (…, M, E).
        alpha: number ≥ 1.
        attn_mask: bool (True = may attend) or additive, broadcast to (…, N, M).
        scale: factor on q·k; None is 1/√D.

    Returns:
        (…, N, E) float64.

    Example:
        >>> q = torch.eye(2)
        >>> attention_reference(q, q, q, scale=9.0)
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return entmax_reference(scores, alpha) @ v.double()
