"""entmax as a graph of plain operators, for torch.export and ONNX: no operator of ours, no compiled kernel, no sort.

The same Newton's steps as in threshold.py. How many a row needs depends on its values, so the search is a loop of the
graph (`torch.while_loop`, ONNX's `Loop`) that ends when all rows have arrived; a fixed number of steps would either be
wrong for some rows or dear for all. The matrix of scores exists as a whole, as every exported softmax has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .threshold import _finite_max, _powers, _regime

MAX_STEPS = 60  # as in threshold.py
HALVINGS = 80
LEAST = 1e-6
_wanted: list[bool] = []


@contextmanager
def plain_operators() -> Iterator[None]:
    """While it is open, what is exported consists of plain operators, for files that run where this package is not.

    Elsewhere `torch.export` keeps our own operator, which is quicker but needs the package.

    Example:
        >>> with plain_operators():
        ...     wants_plain_operators()  # only while something is exported
        False
    """
    _wanted.append(True)
    try:
        yield
    finally:
        _wanted.pop()


def wants_plain_operators() -> bool:
    """Whether a graph of plain operators is being made now."""
    return bool(_wanted) and torch.compiler.is_exporting()


def entmax_graph(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """α-entmax along the last dim, as `solve_rows`, in operators that every exporter knows.

    For inference: no gradient flows through the weights.

    Args:
        scores: (…, N) float32 or float64; −inf marks a masked entry.
        alpha: a number ≥ 1; or a tensor that broadcasts to (…, 1), of values from 1 to 2: where the graph meets a
            larger one, it gives NaN, since Newton's steps need the norm to be convex.

    Returns:
        (…, N); rows sum to 1 (to 0 where every entry is masked, NaN where a row holds NaN or +inf).

    Example:
        >>> entmax_graph(torch.tensor([[0.0, 0.5, 1.0]]), 2.0)
        tensor([[0.0000, 0.2500, 0.7500]])
    """
    scores = scores.detach()
    if isinstance(alpha, Tensor):
        eps = alpha.detach() - 1
        p = _newton(scores, eps, "near softmax")  # the one form that holds for every ε from 0 to 1
        return torch.where(eps > 1, math.nan, p)
    if alpha == 1:
        hidden = scores.amax(-1, keepdim=True) == -math.inf
        return scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    regime = _regime(alpha - 1)
    return _halve(scores, alpha - 1) if regime == "steep" else _newton(scores, alpha - 1, regime)


def attention_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    alpha: float | Tensor,
    scale: float | Tensor,
) -> Tensor:
    """Entmax attention over the whole matrix of scores.

    Args:
        q: (…, N, D).
        k: (…, M, D).
        v: (…, M, E).
        attn_mask: bool, True = may attend, or added to the scores.
        alpha: as for `entmax_graph`, a tensor broadcast to (…, N, 1).
        scale: factor on q·k, a tensor broadcast to (…, N, 1).

    Returns:
        (…, N, E) in q's dtype.

    Example:
        >>> q = torch.eye(2)
        >>> attention_graph(q, q, q, None, 1.5, 9.0)
        tensor([[1., 0.],
                [0., 1.]])
    """
    from .tiles import masked_scores, without_hidden_keys  # which load the kernels' files; a graph needs none

    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = without_hidden_keys(k.to(work), v.to(work), attn_mask)
    scores = masked_scores(q.to(work) * scale, k, attn_mask, 1.0)
    return (entmax_graph(scores, alpha) @ v).to(q.dtype)


def _newton(scores: Tensor, eps: float | Tensor, regime: str) -> Tensor:
    wide = scores
    if regime == "near softmax":
        # ONNX has no log1p: its 1 + z must not round ε away. Below the least ε, entmax is softmax within 1e-6.
        wide = scores.double()
        eps = eps.double().clamp_min(LEAST) if isinstance(eps, Tensor) else max(eps, LEAST)
    top = _finite_max(wide)
    z = (wide - top) * eps
    within = 1e-5 if z.dtype == torch.float32 else 1e-9

    # The exporter finds z only where the loop's own function names it: not through a function in between.
    def going_on(count: Tensor, going: Tensor, shift: Tensor) -> Tensor:
        return going & (count < MAX_STEPS)

    def step(count: Tensor, going: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, slope = _powers(z, shift, eps, regime)
        if isinstance(eps, Tensor):  # 0^0 off the support of an α of 2
            slope = torch.where(p > 0, slope, 0.0)
        s0 = p.sum(-1, keepdim=True)
        rise = (s0 * -torch.expm1(-eps * _at_least_tiny(s0).log())).clamp_min(0)
        moved = shift + rise / _at_least_tiny(slope.sum(-1, keepdim=True))
        return count + 1, ((s0 > 1 + within) & (moved != shift)).any(), moved

    start = torch.zeros_like(top) if regime == "near softmax" else torch.zeros_like(top) - 1
    shift = torch.while_loop(going_on, step, (*_begin(start), start))[2]
    p, _ = _powers(z, shift, eps, regime)
    return (p / _at_least_tiny(p.sum(-1, keepdim=True))).to(scores.dtype)


def _halve(scores: Tensor, eps: float) -> Tensor:
    """For α > 2, as `threshold._bisect`: the logarithm of −τ, in float64."""
    wide = scores.double()
    z = (wide - _finite_max(wide)) * eps
    entries = (z > -math.inf).sum(-1, keepdim=True).clamp_min(1)
    low = -eps * entries.to(z.dtype).log()

    def going_on(count: Tensor, going: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return going & (count < HALVINGS)

    def step(count: Tensor, going: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        middle = (low + high) / 2
        too_little = (z + middle.exp()).clamp_min(0).pow(1 / eps).sum(-1, keepdim=True) < 1
        moved = torch.where(too_little, middle, low), torch.where(too_little, high, middle)
        return count + 1, going.clone(), *moved

    high = torch.while_loop(going_on, step, (*_begin(low), low, torch.zeros_like(low)))[3]
    p = (z + high.exp()).clamp_min(0).pow(1 / eps)
    return (p / _at_least_tiny(p.sum(-1, keepdim=True))).to(scores.dtype)


def _at_least_tiny(x: Tensor) -> Tensor:
    """As threshold.py's, with a number that float32 holds: in an ONNX file the bound of float64 values is one too."""
    return x.clamp_min(1e-30)


def _begin(like: Tensor) -> tuple[Tensor, Tensor]:
    """No step taken, and more to come."""
    return torch.zeros((), dtype=torch.int64, device=like.device), torch.ones((), dtype=torch.bool, device=like.device)
