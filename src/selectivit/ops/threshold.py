"""The threshold of α-entmax, found without a sort: Newton on a norm, started from lane maxima.

With ε = α − 1 and z = ε(x − max x), entmax is p = [z − τ]₊^(1/ε), with τ in [−1, 0) such that Σp = 1. On u = [z − τ]₊
the function ‖u‖_{1/ε} − 1 is convex and decreasing in τ for α ≤ 2, so Newton's steps from the left rise monotonically
and need no bracket:

    τ ← τ + S₀(1 − S₀^(−ε)) / S₁,   S₀ = Σ u^(1/ε),   S₁ = Σ u^(1/ε − 1)

The τ of any subset of a row is at most the row's own, so the subset of 64 lane maxima gives a safe start that leaves
one to three steps for the whole row. Nothing here knows autograd; derivatives.py holds those formulas.

Three regimes, by α: close to 1 the steps run on σ = 1 + τ, whose limit σ/ε is log-sum-exp; up to 2 on τ itself, which
a long flat row needs to full relative precision; above 2 the norm is not convex, and bisection serves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LANES = 64
MAX_STEPS = 60  # Newton needs 2 to 4; the bound only guards against rounding that never settles
MAX_INTEGER_POWER = 10
NEAR_SOFTMAX = 0.05  # ε below this: the logarithm of 1 + (z − σ) must not round 1 + … first


def solve_rows(scores: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return entmax's probabilities and the threshold τ of every row.

    Args:
        scores: (R, N) float32 or float64, N ≥ 1; −inf marks a masked entry.
        alpha: a number ≥ 1, or (R, 1) of the scores' dtype.

    Returns:
        p (R, N), rows sum to 1 (to 0 where every entry is masked, NaN where a row holds NaN or +inf), and τ (R, 1).
    """
    if not isinstance(alpha, Tensor):
        return _solve(scores, alpha - 1, _regime(alpha - 1))
    p, tau = torch.empty_like(scores), torch.empty_like(scores[:, :1])
    for regime, rows in _rows_of_regimes(alpha):
        p[rows], tau[rows] = _solve(scores[rows], alpha[rows] - 1, regime)
    return p, tau


def rows_from_threshold(scores: Tensor, tau: Tensor, alpha: float | Tensor) -> Tensor:
    """Return the probabilities of rows whose τ is known, as `solve_rows` would: one pass, no search."""
    if not isinstance(alpha, Tensor):
        return _evaluate(scores, tau, alpha - 1, _regime(alpha - 1))
    p = torch.empty_like(scores)
    for regime, rows in _rows_of_regimes(alpha):
        p[rows] = _evaluate(scores[rows], tau[rows], alpha[rows] - 1, regime)
    return p


def _regime(eps: float) -> str:
    return "near softmax" if eps < NEAR_SOFTMAX else "steep" if eps > 1 else "power"


def _rows_of_regimes(alpha: Tensor) -> Sequence[tuple[str, Tensor | slice]]:
    """Which rows each regime holds; one slice where all rows share one, as they nearly always do."""
    eps = alpha[:, 0] - 1
    near, steep = eps < NEAR_SOFTMAX, eps > 1
    masks = {"near softmax": near, "steep": steep, "power": ~(near | steep)}
    present = [(name, mask) for name, mask in masks.items() if bool(mask.any())]
    return [(present[0][0], slice(None))] if len(present) == 1 else present


def _solve(scores: Tensor, eps: float | Tensor, regime: str) -> tuple[Tensor, Tensor]:
    if regime == "steep":
        p, tau = _bisect(scores.double(), eps)
        return p.to(scores.dtype), tau.to(scores.dtype)
    lanes = _lane_maxima(scores)
    top = _finite_max(lanes)
    eps, start = _off_zero(eps), torch.zeros_like(top)
    shift = start if regime == "near softmax" else start - 1  # σ = 0 or τ = −1: the leftmost either can be
    if lanes is not scores:
        shift = _newton((lanes - top).mul_(eps), shift, eps, regime)[1]
    p, shift = _newton((scores - top).mul_(eps), shift, eps, regime)
    return p, shift - 1 if regime == "near softmax" else shift


def _evaluate(scores: Tensor, tau: Tensor, eps: float | Tensor, regime: str) -> Tensor:
    if regime == "steep":
        return _solve(scores, eps, regime)[0]
    eps, shift = _off_zero(eps), 1 + tau if regime == "near softmax" else tau
    p, slope = _powers((scores - _finite_max(scores)).mul_(eps), shift, eps, regime)
    total = _at_least_tiny(p.sum(-1, keepdim=True))
    return p / total if p is slope else p.div_(total)


def _off_zero(eps: float | Tensor) -> float | Tensor:
    """ε where the formulas divide by it; so far below rounding that α = 1 stays softmax."""
    return eps.clamp_min(1e-30) if isinstance(eps, Tensor) else max(eps, 1e-30)


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


def _newton(z: Tensor, shift: Tensor, eps: float | Tensor, regime: str) -> tuple[Tensor, Tensor]:
    """Newton's steps from the left until every row's sum is within reach of one last step; then that step."""
    within = 1e-5 if z.dtype == torch.float32 else 1e-9
    buffer, last = torch.empty_like(z), False
    p, slope = _powers(z, shift, eps, regime, out=buffer)
    s0 = p.sum(-1, keepdim=True)
    for _ in range(MAX_STEPS):
        if last:
            break
        rise = (s0 * -torch.expm1(-eps * _at_least_tiny(s0).log())).clamp_min(0)
        moved = shift + rise / _at_least_tiny(slope.sum(-1, keepdim=True))
        last = not bool(((s0 > 1 + within) & (moved != shift)).any())
        shift = moved
        p, slope = _powers(z, shift, eps, regime, out=buffer)
        s0 = p.sum(-1, keepdim=True)
    return p.div_(_at_least_tiny(s0)), shift


def _powers(
    z: Tensor, shift: Tensor, eps: float | Tensor, regime: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(u^(1/ε), u^(1/ε − 1)); the second is 0 off the support. `out` may become either."""
    if regime == "near softmax":
        log_p = torch.sub(z, shift, out=out).clamp_(min=-1).log1p_().div_(eps)
        return log_p.exp(), (log_p * (1 - eps)).exp_()
    u = torch.sub(z, shift, out=out).clamp_(min=0)
    power = None if isinstance(eps, Tensor) else _small_integer(1 / eps)
    if power == 1:
        return u, (u > 0).to(u.dtype)
    if power is not None:
        slope = _integer_power(u, power - 1)
    else:
        slope = torch.where(u > 0, u.log().mul_(1 / eps - 1).exp_(), 0.0)
    return u * slope, slope


def _small_integer(power: float) -> int | None:
    """1/ε where it is a small integer: α = 2, 1.5, 1.333…, 1.25, 1.2."""
    near = round(power)
    return near if near <= MAX_INTEGER_POWER and abs(power - near) <= 1e-9 * near else None


def _integer_power(u: Tensor, n: int) -> Tensor:
    """u^n by squaring; the vectorised pow costs as much as ten products."""
    if n == 1:
        return u
    half = _integer_power(u, n // 2)
    squared = half * half
    return squared * u if n % 2 else squared


def _at_least_tiny(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny)


def _bisect(scores: Tensor, eps: float | Tensor) -> tuple[Tensor, Tensor]:
    """For α > 2: −τ lies in [n^(−ε), 1], over many magnitudes, so its logarithm is bisected, in float64."""
    z = (scores - _finite_max(scores)) * eps
    entries = (z > -math.inf).sum(-1, keepdim=True).clamp_min(1)
    low, high = -eps * entries.to(z.dtype).log(), torch.zeros_like(z[:, :1])  # of ln(−τ)
    for _ in range(80):
        middle = (low + high) / 2
        too_little = (z + middle.exp()).clamp_min(0).pow(1 / eps).sum(-1, keepdim=True) < 1
        low, high = torch.where(too_little, middle, low), torch.where(too_little, high, middle)
    p = (z + high.exp()).clamp_min(0).pow(1 / eps)
    return p / _at_least_tiny(p.sum(-1, keepdim=True)), -high.exp()
