"""α-entmax: values, edges, derivatives of every kind, against bisection in float64 and the entmax package."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import selectivit as sv
from selectivit.ops import derivatives, threshold
from selectivit.ops.kernels import cpu
from selectivit.ops.reference import entmax_reference

pytestmark = pytest.mark.usefixtures("poisoned_empty")
INF = math.inf


@pytest.fixture(scope="module", autouse=True, params=("compiled kernel where it serves", "pure PyTorch"))
def _path(request):
    with cpu.using("off") if request.param == "pure PyTorch" else contextlib.nullcontext():
        yield


ALPHAS = (1.0, 1.001, 1.04, 1.05, 1.2, 1.25, 1.5, 1.7, 1.99, 2.0, 2.5, 4.0, 8.0, 20.0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@given(
    rows=st.integers(1, 5),
    n=st.sampled_from((1, 2, 7, 63, 255, 256, 300, 1370)),
    alpha=st.sampled_from(ALPHAS),
    width=st.sampled_from((1e-3, 0.3, 1.0, 5.0, 100.0, 1e3)),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_bisection(rows, n, alpha, width, masked, seed):
    scores = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * width
    if masked:
        scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.4] = -INF
    p, expected = sv.entmax(scores, alpha), entmax_reference(scores, alpha)
    assert (p - expected).abs().max() < 3e-6
    sums = torch.where((scores > -INF).any(-1), 1.0, 0.0)
    torch.testing.assert_close(p.sum(-1), sums, atol=1e-5, rtol=0)
    assert (p[scores == -INF] == 0).all()


@pytest.mark.parametrize("n", (50, 1000))
@pytest.mark.parametrize("alpha", (1.3, 1.5, 2.0))
def test_equals_the_entmax_package(n, alpha):
    package = pytest.importorskip("entmax")
    scores = torch.randn(8, n, dtype=torch.float64) * 3
    expected = {1.5: package.entmax15, 2.0: package.sparsemax}.get(
        alpha, lambda x, dim: package.entmax_bisect(x, alpha, dim, n_iter=80)
    )(scores, dim=-1)
    torch.testing.assert_close(sv.entmax(scores, alpha), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("alpha", (1.2, 1.5, 2.0))
def test_skewed_and_flat_rows_need_the_whole_search(alpha):
    """One lane that holds every large entry, a ramp, a plateau below a peak: where lane maxima mislead most."""
    n = 1024
    lane = torch.zeros(n).index_fill(0, torch.arange(0, n, 64), 3.0)
    rows = torch.stack(
        [lane, torch.linspace(0, 1, n), torch.zeros(n), torch.zeros(n).index_fill(0, torch.tensor([5]), 1.9)]
    )
    assert (sv.entmax(rows, alpha) - entmax_reference(rows, alpha)).abs().max() < 1e-6


# What broke public implementations: input, α, right value.
BREAKERS = {
    "far below zero in bfloat16": (torch.tensor([-1005.0] * 128 + [-1000.0], dtype=torch.bfloat16), 1.5, None),
    "alpha of exactly one": (torch.tensor([0.0, 0.0, 1.0]), 1.0, [0.2119, 0.2119, 0.5761]),
    "masked entry in sparsemax": (torch.tensor([0.0, 0.5, -INF]), 2.0, [0.25, 0.75, 0.0]),
    "huge equal scores": (torch.tensor([1e8, 1e8]), 2.0, [0.5, 0.5]),
    "large scores in bfloat16": (torch.tensor([100.0, 100.5], dtype=torch.bfloat16), 2.0, [0.25, 0.75]),
    "sparsemax of three": (torch.tensor([0.0, 0.5, 1.0]), 2.0, [0.0, 0.25, 0.75]),
    "huge unequal scores": (torch.tensor([1.37e8, 1.60e8]), 2.0, [0.0, 1.0]),
    "scaled scores below -1000": (torch.tensor([-5000.0, -5000.0, -9000.0]), 1.5, [0.5, 0.5, 0.0]),
}


@pytest.mark.parametrize("name", BREAKERS)
def test_input_that_broke_others(name):
    scores, alpha, expected = BREAKERS[name]
    if expected is None:
        expected = [0.0] * 128 + [1.0]
    p = sv.entmax(scores, alpha)
    assert p.dtype == scores.dtype
    torch.testing.assert_close(p.float(), torch.tensor(expected), atol=6e-5, rtol=0)


def test_alpha_of_three_on_wide_scores_is_one_hot():
    scores = 1000 * torch.randn(16, 200, generator=torch.Generator().manual_seed(0))
    p = sv.entmax(scores, 3.0)
    assert torch.equal(p.argmax(-1), scores.argmax(-1))
    assert (p.amax(-1) > 0.99).all() and torch.isfinite(p).all()


@pytest.mark.parametrize("keep_graph", (False, True))
@pytest.mark.parametrize("value", (1.0, 1.0000001, 1.00001, 1.0001))
def test_alpha_gradient_close_to_one(value, keep_graph):
    alpha = torch.tensor(value, requires_grad=True)
    energy = sv.entmax(torch.tensor([0.0, 0.3, 1.0]), alpha).square().sum()
    (slope,) = torch.autograd.grad(energy, alpha, create_graph=keep_graph)
    assert slope.item() == pytest.approx(0.1364, abs=5e-4)


def test_alpha_alone_learns_by_every_way_of_differentiating():
    x = torch.tensor([[0.1, 0.4, 0.2], [-INF] * 3], dtype=torch.float64)
    weight = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)

    def energy(alpha):
        return (sv.entmax(x, alpha) * weight).sum()

    alpha, h = torch.tensor(1.5, dtype=torch.float64, requires_grad=True), 1e-4
    slope = ((energy(alpha + h) - energy(alpha - h)) / (2 * h)).item()
    bend = ((energy(alpha + h) - 2 * energy(alpha) + energy(alpha - h)) / h**2).item()
    (first,) = torch.autograd.grad(energy(alpha), alpha, create_graph=True)
    (second,) = torch.autograd.grad(first, alpha)
    assert first.item() == pytest.approx(slope, rel=1e-6) and second.item() == pytest.approx(bend, rel=1e-4)
    assert torch.func.grad(energy)(alpha.detach()).item() == pytest.approx(slope, rel=1e-6)
    assert torch.func.jacrev(energy)(alpha.detach()).item() == pytest.approx(slope, rel=1e-6)
    assert torch.func.jvp(energy, (alpha.detach(),), (torch.ones_like(alpha),))[1].item() == pytest.approx(
        slope, rel=1e-6
    )


def test_double_backward_at_the_edge_is_finite():
    x = torch.tensor([0.0, 0.5, 1.0, -9.0], requires_grad=True)
    (grad,) = torch.autograd.grad(sv.entmax15(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    assert torch.isfinite(second).all() and second[3] == 0 and second.abs().sum() > 0


@pytest.mark.parametrize("dim", (0, 1, -2, 2))
def test_dim_is_the_same_as_moving_the_axis(dim):
    x = torch.randn(4, 6, 5)
    torch.testing.assert_close(sv.entmax15(x, dim), sv.entmax15(x.movedim(dim, -1)).movedim(-1, dim))


def test_gradient_does_not_depend_on_the_number_of_dims():
    x = torch.randn(3, 1, 9, requires_grad=True)
    weight = torch.randn(3, 1, 9)
    (three,) = torch.autograd.grad((sv.entmax15(x) * weight).sum(), x)
    flat = x.detach().view(3, 9).requires_grad_()
    (two,) = torch.autograd.grad((sv.entmax15(flat) * weight.view(3, 9)).sum(), flat)
    torch.testing.assert_close(three.view(3, 9), two)


def test_alphas_of_every_regime_in_one_call():
    alphas = torch.tensor([1.0, 1.01, 1.5, 2.0, 3.0, 10.0]).view(6, 1)
    scores = torch.randn(6, 300)
    p = sv.entmax(scores, alphas)
    for row, alpha in enumerate(alphas.flatten().tolist()):
        assert (p[row] - entmax_reference(scores[row], alpha)).abs().max() < 1e-6, alpha


@pytest.mark.parametrize("alpha", (1.04, 1.5, 1.99, 2.0))
@pytest.mark.parametrize("width", (1e-7, 1e-3, 1.0))
@pytest.mark.parametrize("n", (1370, 20_000))
def test_newton_takes_few_steps_also_on_flat_rows(alpha, width, n, monkeypatch):
    steps = 0
    powers = threshold._powers

    def counted(z, *args, **kwargs):
        nonlocal steps
        steps += z.shape[-1] == n
        return powers(z, *args, **kwargs)

    monkeypatch.setattr(threshold, "_powers", counted)
    scores = torch.randn(4, n, generator=torch.Generator().manual_seed(0)) * width
    p, _ = threshold.solve_rows(scores, alpha)
    assert steps <= 12  # where σ is rounded instead of τ, all 60 are taken
    expected = entmax_reference(scores, alpha)
    assert (p - expected).norm() < 3e-6 * expected.norm()


# One policy for rows at the edge.
@pytest.mark.parametrize("alpha", (1.0, 1.3, 1.5, 2.0, 3.0))
@pytest.mark.parametrize("n", (4, 300))
def test_fully_masked_row_gives_zeros_and_no_gradient(alpha, n):
    x = torch.full((2, n), -INF)
    x[1] = torch.randn(n)
    x.requires_grad_()
    p = sv.entmax(x, alpha)
    assert (p[0] == 0).all() and p[1].sum().item() == pytest.approx(1)
    p.square().sum().backward()
    assert x.grad is not None and (x.grad[0] == 0).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("alpha", (1.0, 1.3, 1.5, 2.0, 3.0))
@pytest.mark.parametrize("bad", (math.nan, INF))
def test_nan_and_infinity_give_a_nan_row_as_softmax_does(alpha, bad):
    x = torch.zeros(2, 300)
    x[0, 7] = bad
    p = sv.entmax(x, alpha)
    assert p[0].isnan().all() and torch.isfinite(p[1]).all()


def test_empty_dimensions():
    assert sv.entmax(torch.empty(3, 0)).shape == (3, 0)
    assert sv.entmax(torch.empty(0, 5)).shape == (0, 5)
    assert sv.entmax(torch.tensor(3.0), dim=0).item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", (1.0, 1.2, 1.5, 2.0))
def test_every_dtype(dtype, alpha):
    x = torch.randn(7, 333).to(dtype)
    p = sv.entmax(x, alpha)
    assert p.dtype == dtype
    bound = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(p.double(), entmax_reference(x, alpha), atol=bound, rtol=bound)
    torch.testing.assert_close(p.double().sum(-1), torch.ones(7, dtype=torch.float64), atol=20 * bound, rtol=0)


def test_shift_invariance_and_noncontiguous_input():
    x = torch.randn(5, 400).t()
    torch.testing.assert_close(sv.entmax15(x), sv.entmax15(x.contiguous()))
    torch.testing.assert_close(sv.entmax15(x), sv.entmax15(x + 64.0), atol=1e-4, rtol=0)


# Derivatives.
@pytest.mark.parametrize("alpha", (1.0, 1.01, 1.2, 1.5, 1.7, 2.0, 2.5))
def test_first_and_second_derivatives(alpha):
    x = (torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2).requires_grad_()
    assert gradcheck(lambda t: sv.entmax(t, alpha, 1), x, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda t: sv.entmax(t, alpha, 1), x)


def test_learnable_alpha_per_head():
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    alpha = torch.tensor([1.3, 1.5, 1.9], dtype=torch.float64).view(3, 1).requires_grad_()
    assert gradcheck(lambda t, a: sv.entmax(t, a), (x, alpha), check_forward_ad=True)
    assert gradgradcheck(lambda t, a: sv.entmax(t, a), (x, alpha))


def test_second_derivative_with_a_constant_upstream_gradient():
    x = torch.tensor([0.1, 0.4, 0.2], dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (by_alpha,) = torch.autograd.grad(sv.entmax(x, alpha)[0], alpha, create_graph=True)
    (mixed,) = torch.autograd.grad(by_alpha, x)
    h = 1e-6
    for i in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[i] = h
        p = [sv.entmax(x.detach() + s * step, 1.5) for s in (1, -1)]
        slope = [derivatives.alpha_derivative(q, 1.5)[0].item() for q in p]
        assert mixed[i].item() == pytest.approx((slope[0] - slope[1]) / (2 * h), abs=1e-5)


def test_alpha_tensor_equals_alpha_float():
    x = torch.randn(4, 3, 300)
    for a in (1.0, 1.2, 1.5, 2.0):
        torch.testing.assert_close(sv.entmax(x, torch.tensor(a)), sv.entmax(x, a), atol=2e-6, rtol=0)


def test_hessian_by_forward_over_reverse():
    x = torch.randn(5, dtype=torch.float64)

    def energy(t):
        return sv.entmax15(t).pow(3).sum()

    torch.testing.assert_close(torch.func.hessian(energy)(x), torch.autograd.functional.hessian(energy, x))


def test_vmap_over_any_dim_and_over_alpha():
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(
        torch.func.vmap(lambda t: sv.entmax(t, 1.5, 0), in_dims=1, out_dims=1)(x), sv.entmax(x, 1.5, 0)
    )
    alphas = torch.tensor([1.2, 1.5, 2.0])
    each = torch.func.vmap(lambda t, a: sv.entmax(t, a))(x, alphas)
    torch.testing.assert_close(
        each, torch.stack([sv.entmax(x[i], float(alphas[i])) for i in range(3)]), atol=2e-6, rtol=0
    )
    grads = torch.func.vmap(torch.func.grad(lambda t: sv.entmax15(t)[0].square().sum()))(x)
    assert grads.shape == x.shape and grads.abs().sum() > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("learnt", (False, True))
def test_compiles_as_one_graph(learnt):
    alpha = torch.tensor(1.4, requires_grad=True) if learnt else 1.5

    def loss(t):
        return sv.entmax(t, alpha).square().sum()

    x = torch.randn(3, 40, requires_grad=True)
    wanted = (x, alpha) if learnt else (x,)
    expected = torch.autograd.grad(loss(x), wanted)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), wanted)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


# Errors.
@pytest.mark.parametrize(
    "alpha", (0.99, -1.0, math.nan, INF, torch.tensor(0.5), torch.tensor([1.5, math.nan]).view(2, 1))
)
def test_alpha_out_of_range(alpha):
    with pytest.raises(ValueError, match="alpha must be a finite number >= 1"):
        sv.entmax(torch.zeros(2, 3), alpha)


def test_other_bad_arguments():
    with pytest.raises(TypeError, match=r"floating-point scores.*int64"):
        sv.entmax(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(IndexError, match="dim 2 is out of range"):
        sv.entmax(torch.zeros(2, 3), dim=2)
    with pytest.raises(ValueError, match=r"does not broadcast.*size 1 along dim 1"):
        sv.entmax(torch.zeros(2, 3), torch.full((2, 3), 1.5))
