"""The Fenchel-Young loss of α-entmax: cross-entropy's counterpart, exactly zero once the margin is won."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .entmax import check_alpha, entmax
from .entmax_autograd import working_dtype

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
    alpha, counts = check_alpha(alpha), target != ignore_index
    if _values_are_at_hand() and not bool(((target >= 0) & (target < scores.shape[-1]) | ~counts).all()):
        raise IndexError(f"targets must lie in 0 … {scores.shape[-1] - 1} or be ignore_index {ignore_index}")
    losses = _row_losses(scores.to(working_dtype(scores)), torch.where(counts, target, 0), alpha)
    losses = torch.where(counts, losses, 0.0).to(scores.dtype)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _row_losses(x: Tensor, target: Tensor, alpha: float) -> Tensor:
    """Loss of every row. The gradient through p vanishes, since p maximises, which leaves p − e_target."""
    p = entmax(x, alpha)
    top = x.detach().amax(-1, keepdim=True)
    lead = (top - x.gather(-1, target.unsqueeze(-1))).squeeze(-1)
    reached = torch.where(p > 0, x - top, 0.0)  # a masked class adds nothing, not 0 · −inf
    return (p * reached).sum(-1) + lead + _tsallis_entropy(p, alpha)


def _tsallis_entropy(p: Tensor, alpha: float) -> Tensor:
    """H_α(p) = (1 − Σp^α) / (α(α − 1)), written so that nothing cancels as α → 1, where it is Shannon's."""
    eps = max(alpha - 1, 1e-30)
    log_p = torch.where(p > 0, p, 1.0).log()
    return -(p * torch.expm1(eps * log_p)).sum(-1) / (alpha * eps)


def _values_are_at_hand() -> bool:
    """Whether a condition on values can be asked: not while torch.compile traces or a function transform runs."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
