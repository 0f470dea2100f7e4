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


@pytest.mark.parametrize("alpha", (1.0, 1.5, 2.0))
def test_shift_of_all_scores_changes_nothing(alpha):
    x, y = torch.tensor([[0.5, 1.0, -0.25]]), torch.tensor([0])
    torch.testing.assert_close(sv.entmax_loss(x + 2.0**20, y, alpha), sv.entmax_loss(x, y, alpha))


@pytest.mark.parametrize("alpha", (1.0002, 1.001, 1.01))
def test_close_to_cross_entropy_nothing_cancels(alpha):
    x, y = torch.randn(50, 1000), torch.randint(1000, (50,))
    exact = sv.entmax_loss(x.double(), y, alpha)
    assert sv.entmax_loss(x, y, alpha).item() == pytest.approx(exact.item(), abs=2e-5)


@pytest.mark.filterwarnings("ignore")
def test_transforms_and_compile():
    x, y = torch.randn(4, 5), torch.tensor([0, 4, 2, 1])
    expected = sv.entmax15(x) - F.one_hot(y, 5)

    def loss(scores, target):
        return sv.entmax_loss(scores, target, reduction="sum")

    torch.testing.assert_close(torch.func.grad(loss)(x, y), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x, y), expected, atol=1e-6, rtol=0)
    slope = torch.func.jvp(lambda t: loss(t, y), (x,), (torch.ones_like(x),))[1]
    assert slope.item() == pytest.approx(0, abs=1e-5)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    scores = x.clone().requires_grad_()
    compiled(scores, y).backward()
    torch.testing.assert_close(scores.grad, expected, atol=1e-6, rtol=0)


def test_bad_arguments():
    x = torch.zeros(2, 3)
    with pytest.raises(IndexError, match="0 … 2"):
        sv.entmax_loss(x, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="int64 targets of shape"):
        sv.entmax_loss(x, torch.tensor([0]))
    with pytest.raises(ValueError, match="reduction"):
        sv.entmax_loss(x, torch.tensor([0, 1]), reduction="avg")
