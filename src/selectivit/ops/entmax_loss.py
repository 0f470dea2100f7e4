"""The Fenchel-Young loss of α-entmax: cross-entropy's counterpart, exactly zero once the margin is won."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .entmax import check_alpha, entmax, working_dtype

REDUCTIONS = ("mean", "sum", "none")


def entmax_loss(
    scores: Float[Tensor, "*rows classes"],
    target: Int64[Tensor, "*rows"],
    alpha: float = 1.5,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Float[Tensor, ""] | Float[Tensor, "*rows"]:
    """Loss of scores against class indices: H_α(p) + ⟨p − e_target, x⟩ with p = entmax(x).

    Its gradient is p − e_target, so it is zero once the target leads by the margin.

    Args:
        scores: (…, K) floating; −inf masks a class.
        target: (…) int64 class indices.
        alpha: number ≥ 1; 1 is cross-entropy.
        ignore_index: rows with this target count neither in the sum nor in the mean.
        reduction: "mean" over the rows that count, "sum", or "none".

    Returns:
        A scalar, or (…) with reduction "none" (0 in ignored rows).

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, alpha below 1.
        IndexError: a target outside 0 … K − 1.

    Example:
        >>> entmax_loss(torch.tensor([[0.0, 1.0, -float("inf")]]), torch.tensor([1])).item() < 0.2
        True

    Source: Peters, Niculae, Martins, arXiv 1905.05702, section 3.
    """
    if target.shape != scores.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"entmax_loss expects int64 targets of shape {tuple(scores.shape[:-1])} for scores of shape "
            f"{tuple(scores.shape)}, got {target.dtype} of shape {tuple(target.shape)}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    counts = target != ignore_index
    if not bool(((target >= 0) & (target < scores.shape[-1]) | ~counts).all()):
        raise IndexError(f"targets must lie in 0 … {scores.shape[-1] - 1} or be ignore_index {ignore_index}")
    index = torch.where(counts, target, 0)
    losses = torch.where(counts, _FenchelYoung.apply(scores, index, check_alpha(alpha)), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class _FenchelYoung(torch.autograd.Function):
    """Row losses with the gradient p − e; autograd through p would multiply 0 by −inf at masked classes."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(scores, target)
        ctx.alpha = alpha
        x = scores.to(working_dtype(scores))
        p = entmax(x, alpha)
        reached = torch.where(p > 0, x, 0.0)  # a masked class has p = 0 and adds nothing, not 0 · −inf
        gain = (p * reached).sum(-1) - x.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return (gain + _tsallis_entropy(p, alpha)).clamp_min(0).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scores, target = ctx.saved_tensors
        p = entmax(scores, ctx.alpha)
        one_hot = torch.zeros_like(p).scatter(-1, target.unsqueeze(-1), 1)
        return grads[0].unsqueeze(-1) * (p - one_hot), None, None


def _tsallis_entropy(p: Tensor, alpha: float) -> Tensor:
    if alpha - 1 < 1e-4:  # the quotient cancels; Shannon's entropy is its limit
        return torch.special.entr(p).sum(-1)
    return (1 - p.pow(alpha).sum(-1)) / (alpha * (alpha - 1))
