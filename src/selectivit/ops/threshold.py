"""The threshold of α-entmax, found without a sort: Newton on a norm, started from lane maxima.

With ε = α − 1 and z = ε(x − max x), entmax is p = [1 + z − σ]₊^(1/ε) where σ ≥ 0 makes Σp = 1 (σ = τ + 1 in the
papers' notation; as α → 1, σ/ε tends to log-sum-exp). On u = [1 + z − σ]₊ the function ‖u‖_{1/ε} − 1 is convex and
decreasing in σ for α ≤ 2, so Newton's steps from the left rise monotonically and need no bracket:

    σ ← σ + S₀(1 − S₀^(−ε)) / S₁,   S₀ = Σ u^(1/ε),   S₁ = Σ u^(1/ε − 1)

The σ of any subset of a row is at most the row's own, so the subset of 64 lane maxima gives a safe start that leaves
one to three steps for the whole row. Nothing here knows autograd; derivatives.py holds those formulas.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LANES = 64
MAX_STEPS = 60  # Newton needs 2 to 4; more means a row of NaN, which no step can mend
MAX_INTEGER_POWER = 10


def solve_rows(scores: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return entmax's probabilities and the threshold σ of every row.

    Args:
        scores: (R, N) float32 or float64, N ≥ 1; −inf marks a masked entry.
        alpha: a number ≥ 1, or (R, 1) of the scores' dtype.

    Returns:
        p (R, N), rows sum to 1 (to 0 where every entry is masked, NaN where a row holds NaN or +inf), and σ (R, 1).
    """
    if _any_above_two(alpha):
        p, sigma = _solve_by_bisection(scores.double(), alpha)
        return p.to(scores.dtype), sigma.to(scores.dtype)
    eps, power = _exponents(alpha)
    lanes = _lane_maxima(scores)
    top = _finite_max(lanes)
    sigma = torch.zeros_like(top)
    if lanes is not scores:
        sigma = _newton((lanes - top).mul_(eps), sigma, eps, power)[1]
    return _newton((scores - top).mul_(eps), sigma, eps, power)


def rows_from_threshold(scores: Tensor, sigma: Tensor, alpha: float | Tensor) -> Tensor:
    """Return the probabilities of rows whose σ is known, as `solve_rows` would: one pass, no search."""
    if _any_above_two(alpha):
        return solve_rows(scores, alpha)[0]
    eps, power = _exponents(alpha)
    z = (scores - _finite_max(scores)).mul_(eps)
    p, slope, _ = _powers(z, sigma, eps, power)
    p = p if slope is not p else p.clone()
    return p.div_(_at_least_tiny(p.sum(-1, keepdim=True)))


def _any_above_two(alpha: float | Tensor) -> bool:
    return bool((alpha > 2).any()) if isinstance(alpha, Tensor) else alpha > 2


def _exponents(alpha: float | Tensor) -> tuple[float | Tensor, int | None]:
    """ε, kept off zero where the formulas divide by it, and 1/ε if that is a small integer (α = 2, 1.5, 1.25, 1.2…)."""
    if isinstance(alpha, Tensor):
        return (alpha - 1).clamp_min(1e-30), None
    eps = max(alpha - 1.0, 1e-30)
    power = round(1 / eps)
    return eps, power if power <= MAX_INTEGER_POWER and math.isclose(power * eps, 1.0, rel_tol=1e-9) else None


def _lane_maxima(scores: Tensor) -> Tensor:
    """The largest entry of each of 64 interleaved lanes; the scores themselves where rows are too short to gain."""
    n = scores.shape[-1]
    if n < 4 * LANES:
        return scores
    whole = n - n % LANES
    lanes = scores[:, :whole].unflatten(-1, (whole // LANES, LANES)).amax(1)  # (R, 64)
    if whole < n:
        tail = lanes[:, : n - whole]
        torch.maximum(tail, scores[:, whole:], out=tail)
    return lanes


def _finite_max(scores: Tensor) -> Tensor:
    """Row maxima; 0 for a row of −inf alone, so that subtracting it leaves −inf and not NaN."""
    top = scores.amax(-1, keepdim=True)
    return torch.where(top == -math.inf, 0.0, top)


def _newton(z: Tensor, sigma: Tensor, eps: float | Tensor, power: int | None) -> tuple[Tensor, Tensor]:
    """Newton's steps from the left until every row's sum is within reach of one last step; then that step."""
    within = 1e-5 if z.dtype == torch.float32 else 1e-9
    buffer = torch.empty_like(z)
    p, slope, s0 = _powers(z, sigma, eps, power, out=buffer)
    last = False
    for _ in range(MAX_STEPS):
        if last:
            break
        last = not bool((s0 > 1 + within).any())
        s1 = _at_least_tiny(slope.sum(-1, keepdim=True))
        rise = s0 - s0.sqrt() if power == 2 else s0 * -torch.expm1(-eps * _at_least_tiny(s0).log())
        sigma = sigma + rise.clamp_min(0) / s1
        p, slope, s0 = _powers(z, sigma, eps, power, out=buffer)
    return p.div_(_at_least_tiny(s0)), sigma


def _powers(
    z: Tensor, sigma: Tensor, eps: float | Tensor, power: int | None, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(u^(1/ε), u^(1/ε − 1), Σ u^(1/ε)); with power 2 the first two are made lazily from u, with others at once."""
    if power is None:
        t = torch.sub(z, sigma, out=out).clamp_(min=-1)
        logp = t.log1p_().div_(eps)
        slope = torch.where(logp == -math.inf, 0.0, (logp * (1 - eps)).exp_())
        p = logp.exp_()
        return p, slope, p.sum(-1, keepdim=True)
    u = torch.sub(z, sigma - 1, out=out).clamp_(min=0)
    slope = (u > 0).to(u.dtype) if power == 1 else _integer_power(u, power - 1)
    p = u * slope if power > 1 else u
    return p, slope, p.sum(-1, keepdim=True)


def _integer_power(u: Tensor, n: int) -> Tensor:
    """u^n by squaring; the vectorised pow costs as much as ten products."""
    if n == 1:
        return u
    half = _integer_power(u, n // 2)
    squared = half * half
    return squared * u if n % 2 else squared


def _at_least_tiny(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny)


def _solve_by_bisection(scores: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """For α > 2, where the norm is not convex and p depends on σ steeply: bisection in float64, p from both ends."""
    eps = alpha - 1
    z = (scores - _finite_max(scores)) * eps
    entries = (z > -math.inf).sum(-1, keepdim=True).clamp_min(1)
    low = torch.zeros_like(z[:, :1])
    high = (1 - entries.to(z.dtype) ** -eps).clamp_min(1e-12)  # no row needs a larger σ than the uniform one
    for _ in range(80):
        middle = (low + high) / 2
        too_much = (1 + z - middle).clamp_min(0).pow(1 / eps).sum(-1, keepdim=True) >= 1
        low, high = torch.where(too_much, middle, low), torch.where(too_much, high, middle)
    p = (1 + z - low).clamp_min(0).pow(1 / eps)
    return p / _at_least_tiny(p.sum(-1, keepdim=True)), low
