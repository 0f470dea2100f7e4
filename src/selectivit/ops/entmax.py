"""α-entmax: probabilities with exact zeros (arXiv 1905.05702).

Solver in threshold.py, derivatives in derivatives.py, joined to autograd and torch.compile in entmax_autograd.py.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from .entmax_autograd import _Entmax, _EntmaxFunctorch, working_dtype
from .graph import entmax_graph, wants_plain_operators


def entmax(scores: Float[Tensor, "*shape"], alpha: float | Tensor = 1.5, dim: int = -1) -> Float[Tensor, "*shape"]:
    r"""Map scores to probabilities of which the small ones are exactly zero.

    Solves argmax_p ⟨p, x⟩ + H_α(p) over the simplex, H_α the Tsallis entropy: α = 1 is softmax, α = 2 sparsemax.
    Computed in float32 (float64 for float64 scores) and differentiable twice: reverse over reverse, forward over
    reverse, reverse over forward. Not forward over forward (`jacfwd(jacfwd)`), where torch drops the second order.

    Args:
        scores: floating tensor of any shape; −inf masks an entry.
        alpha: number ≥ 1, or a tensor that broadcasts against the scores with size 1 along `dim`, such as (heads, 1, 1)
            for scores (B, heads, N, N). A tensor that requires grad is learnt; keep it ≥ 1, e.g. 1 + sigmoid(a).
        dim: the dimension that sums to 1.

    Returns:
        Tensor of the scores' shape and dtype. A row that is masked throughout gives zeros and zero gradient; NaN or
        +inf in a row gives a NaN row, as softmax does; an empty dimension gives an empty tensor.

    Raises:
        TypeError: scores are not floating point.
        ValueError: alpha below 1, NaN or infinite, or of a shape that does not broadcast.
        IndexError: dim out of range.

    Example:
        >>> entmax(torch.tensor([0.0, 0.5, 1.0]), alpha=2.0)
        tensor([0.0000, 0.2500, 0.7500])

    Source: Peters, Niculae, Martins, "Sparse Sequence-to-Sequence Models", arXiv 1905.05702.
    """
    if not scores.is_floating_point():
        raise TypeError(f"entmax expects floating-point scores, got {scores.dtype}; call .float() on them first")
    if scores.ndim == 0:
        return entmax(scores.unsqueeze(0), alpha, 0).squeeze(0)
    if not -scores.ndim <= dim < scores.ndim:
        raise IndexError(f"dim {dim} is out of range for scores of shape {tuple(scores.shape)}")
    rows = scores.movedim(dim, -1)
    if wants_plain_operators():
        value = _alpha_rows(alpha, scores, dim) if isinstance(alpha, Tensor) else check_alpha(alpha)
        return entmax_graph(rows.to(working_dtype(rows)), value).to(scores.dtype).movedim(-1, dim)
    function = _Entmax if torch.compiler.is_compiling() else _EntmaxFunctorch
    if isinstance(alpha, Tensor):
        alpha_rows = _alpha_rows(alpha, scores, dim)
        p, _ = function.apply(rows, 0.0, alpha_rows)
    else:
        p, _ = function.apply(rows, check_alpha(alpha), None)
    return p.movedim(-1, dim)


def entmax15(scores: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """Entmax with α = 1.5, the value used in every layer of arXiv 2605.23868.

    Args:
        scores: floating tensor of any shape; −inf masks an entry.
        dim: the dimension that sums to 1.

    Returns:
        Tensor of the scores' shape and dtype; edges and errors as in `entmax`.

    Example:
        >>> entmax15(torch.tensor([0.0, 0.0, 4.0]))
        tensor([0., 0., 1.])
    """
    return entmax(scores, 1.5, dim)


def sparsemax(scores: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """Entmax with α = 2: the Euclidean projection on the simplex.

    Args:
        scores: floating tensor of any shape; −inf masks an entry.
        dim: the dimension that sums to 1.

    Returns:
        Tensor of the scores' shape and dtype; edges and errors as in `entmax`.

    Source: Martins, Astudillo, arXiv 1602.02068.

    Example:
        >>> sparsemax(torch.tensor([0.0, 0.5, -1.0]))
        tensor([0.2500, 0.7500, 0.0000])
    """
    return entmax(scores, 2.0, dim)


def check_alpha(alpha: float | Tensor) -> float:
    """Return alpha as a float, or raise ValueError where it is no finite number ≥ 1."""
    value = float(alpha)
    if not (1 <= value < math.inf):
        raise ValueError(f"alpha must be a finite number >= 1 (1 = softmax, 1.5, 2 = sparsemax), got {alpha}")
    return value


def _alpha_rows(alpha: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Alpha as (…, 1) over the scores' rows, by views, so that autograd sums its gradient back."""
    shape, dim = scores.shape, dim % scores.ndim
    full = alpha.reshape((1,) * (scores.ndim - alpha.ndim) + alpha.shape) if alpha.ndim <= scores.ndim else alpha
    rows = (*shape[:dim], 1, *shape[dim + 1 :])
    if full.ndim != scores.ndim or any(a not in (1, r) for a, r in zip(full.shape, rows, strict=True)):
        raise ValueError(
            f"alpha of shape {tuple(alpha.shape)} does not broadcast over scores of shape {tuple(shape)}; it needs "
            f"size 1 along dim {dim} and size 1 or the scores' elsewhere, e.g. {tuple(rows)}"
        )
    return full.to(working_dtype(scores)).expand(rows).movedim(dim, -1)
