"""Derivatives of α-entmax in closed form, from its output p alone.

With s = p^(2−α) on the support and 0 elsewhere, the Jacobian is J·g = s ⊙ (g − Σsg/Σs): symmetric, so one function
serves forward and reverse mode. The third-order tensor is symmetric too. All work along the last dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def jacobian_product(p: Tensor, alpha: float | Tensor, g: Tensor) -> Tensor:
    """J·g, shaped like p: the derivative of entmax along g, and also the pull-back of a gradient g."""
    s = sensitivity(p, alpha)
    return s * (g - _weighted_mean(s, g))


def second_product(p: Tensor, alpha: float | Tensor, a: Tensor, b: Tensor) -> Tensor:
    """T(a, b, ·): the derivative of J·a along b. With 2 − α times p^(3−2α), which stays finite on the support."""
    s = sensitivity(p, alpha)
    curvature = (2 - alpha) * _power_on_support(p, 3 - 2 * alpha)
    c = curvature * (a - _weighted_mean(s, a)) * (b - _weighted_mean(s, b))
    return c - s * c.sum(-1, keepdim=True) / _total(s)


def alpha_derivative(p: Tensor, alpha: float | Tensor) -> Tensor:
    """∂p/∂α, shaped like p; stable through α = 1, where the difference quotient of the powers cancels."""
    eps = alpha - 1
    log_p = torch.where(p > 0, p, 1.0).log()
    y = -eps * log_p
    psi = log_p.square() * _exp_remainder(y)
    mean_psi = (p * psi).sum(-1, keepdim=True)
    entropy = -(p * log_p).sum(-1, keepdim=True)
    z = (p * y.exp()).sum(-1, keepdim=True)
    return p / z.clamp_min(torch.finfo(p.dtype).tiny) * (mean_psi - psi - eps * (mean_psi * log_p + psi * entropy))


def sensitivity(p: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights s = p^(2−α) on the support, 0 elsewhere."""
    if isinstance(alpha, float) and alpha == 1.5:
        return p.sqrt()
    return _power_on_support(p, 2 - alpha)


def _power_on_support(p: Tensor, exponent: float | Tensor) -> Tensor:
    """p^exponent where p > 0, else 0 (a NaN stays NaN); never 0 to a power that is not positive."""
    if isinstance(exponent, float | int) and exponent == 0:
        return torch.where(p == 0, 0.0, p / p)
    return torch.where(p == 0, 0.0, torch.where(p == 0, 1.0, p).pow(exponent))


def _weighted_mean(s: Tensor, g: Tensor) -> Tensor:
    return (s * g).sum(-1, keepdim=True) / _total(s)


def _total(s: Tensor) -> Tensor:
    """Σs, kept off zero: a row with every entry masked has no support and a zero derivative."""
    return s.sum(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).tiny)


def _exp_remainder(y: Tensor) -> Tensor:
    """(e^y − 1 − y) / y², by its series near 0."""
    series = 0.5 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * (1 / 5040 + y / 40320)))))
    far = y.abs() > 0.3
    safe = torch.where(far, y, 1.0)
    return torch.where(far, (torch.expm1(safe) - safe) / safe.square(), series)
