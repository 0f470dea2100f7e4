"""The Fenchel-Young loss against the entmax package, cross-entropy and its own gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import selectivit as sv


@pytest.mark.parametrize("alpha", (1.5, 2.0))
def test_equals_the_entmax_package(alpha):
    package = pytest.importorskip("entmax")
    loss = package.Entmax15Loss(reduction="none") if alpha == 1.5 else package.SparsemaxLoss(reduction="none")
    x, y = torch.randn(20, 7) * 2, torch.randint(7, (20,))
    torch.testing.assert_close(sv.entmax_loss(x, y, alpha, reduction="none"), loss(x, y), atol=1e-5, rtol=0)


def test_alpha_one_is_cross_entropy():
    x, y = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    y[0, 0] = -100
    expected = F.cross_entropy(x.flatten(0, 1), y.flatten())
    torch.testing.assert_close(sv.entmax_loss(x, y, 1.0), expected)
    torch.testing.assert_close(sv.entmax_loss(x, y, 1.000001), expected, atol=1e-4, rtol=0)


def test_masked_class_is_finite():
    x = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    loss = sv.entmax_loss(x, torch.tensor([0]))
    loss.backward()
    assert math.isfinite(loss.item()) and loss.item() > 0
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_gradient_is_p_minus_target_and_vanishes_beyond_the_margin():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (4,))
    (grad,) = torch.autograd.grad(sv.entmax_loss(x, y, reduction="sum"), x)
    torch.testing.assert_close(grad, sv.entmax15(x) - F.one_hot(y, 5))
    won = torch.tensor([[10.0, 0.0, 0.0]], requires_grad=True)
    assert sv.entmax_loss(won, torch.tensor([0])).item() == 0


def test_derivatives():
    x, y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 1])
    for alpha in (1.0, 1.3, 1.5, 2.0):
        assert gradcheck(lambda t, a=alpha: sv.entmax_loss(t, y, a), x)
        assert gradgradcheck(lambda t, a=alpha: sv.entmax_loss(t, y, a), x)


def test_bad_arguments():
    x = torch.zeros(2, 3)
    with pytest.raises(IndexError, match="0 … 2"):
        sv.entmax_loss(x, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="int64 targets of shape"):
        sv.entmax_loss(x, torch.tensor([0]))
    with pytest.raises(ValueError, match="reduction"):
        sv.entmax_loss(x, torch.tensor([0, 1]), reduction="avg")
