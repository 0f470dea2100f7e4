"""The compiled CPU kernel with α and scale per head, fixed and learnable, against float64 and pure PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import selectivit as sv
from selectivit.ops import attention_autograd, tiles
from selectivit.ops.kernels import cpu

KERNELS = [*cpu.names(), *(f"{name} float32" for name in cpu.names()[:1])]
pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no compiled CPU kernel: {cpu.status()}")
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
ALPHAS = (1.05, 1.2, 1.37, 1.5, 1.50001, 1.75, 2.0)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend(*tensors):
    q, k, v, alpha, scale = tensors
    return sv.entmax_attention(q, k, v, alpha=alpha, scale=scale)


def out_and_gradients(function, tensors, grad, dtype=torch.float32):
    wide = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = function(*wide)
    return out.detach(), *torch.autograd.grad(out, wide, grad.to(dtype))


def check(found, expected, close=1e-4):
    """Output to 1e-5; gradients to 1e-4 of their norm, or to rounding where they are all but zero."""
    assert (found[0] - expected[0]).norm() <= 1e-5 * expected[0].norm()
    largest = max(t.norm().item() for t in expected[1:])
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert a.shape == b.shape and (a - b).norm() <= close * b.norm() + 2e-6 * largest


@pytest.fixture
def without_pytorch(monkeypatch):
    """Fail where the pure-PyTorch tiles would serve."""

    def refuse(*_):
        raise AssertionError("the pure-PyTorch tiles were asked")

    for name in ("masked_scores", "without_hidden_keys"):
        monkeypatch.setattr(tiles, name, refuse)


@every_kernel
@settings(max_examples=12)
@given(
    lead=st.sampled_from(((2,), (1, 3), (3, 2), (2, 1, 2))),
    n=st.integers(1, 200),
    m=st.integers(1, 400),
    d=st.sampled_from((5, 16, 64)),
    width=st.sampled_from((0.1, 1.0, 6.0)),
    each=st.sampled_from(("head", "batch and head", "batch")),
    seed=st.integers(0, 99),
)
def test_learnable_alpha_and_scale_against_float64(kernel, lead, n, m, d, width, each, seed):
    q, k, v = draw(*lead, n, d, seed=seed) * width, draw(*lead, m, d, seed=seed + 1), draw(*lead, m, 24, seed=seed + 2)
    shape = {"head": lead[-1:], "batch and head": lead, "batch": (*lead[:-1], 1)}[each]
    count = torch.Size(shape).numel()
    alpha = torch.tensor([ALPHAS[(seed + i) % len(ALPHAS)] for i in range(count)]).view(*shape, 1, 1)
    scale = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.5).view(*shape, 1, 1)
    tensors = (q, k, v, alpha.clamp_max(1.99), scale)  # at 2 the gradient jumps where an entry's weight is rounding
    grad = draw(*lead, n, 24, seed=seed + 3)
    with cpu.using(kernel):
        found = out_and_gradients(attend, tensors, grad)
    check(found, out_and_gradients(attend, tensors, grad, torch.float64))


@every_kernel
def test_gradient_of_an_alpha_near_one_does_not_cancel(kernel):
    q, k, v, grad = (draw(2, 4, n, 32, seed=s) for s, n in enumerate((60, 90, 90, 60)))
    tensors = (q * 0.1, k, v, torch.full((4, 1, 1), 1.05), torch.full((1,), 32**-0.5))
    with cpu.using(kernel):
        found = out_and_gradients(attend, tensors, grad)[4]
    expected = out_and_gradients(attend, tensors, grad, torch.float64)[4]
    assert (found - expected).norm() <= 6e-5 * expected.norm()  # 2e-4 with the difference of powers alone


@every_kernel
@pytest.mark.usefixtures("without_pytorch")
def test_heads_choose_their_powers_one_by_one(kernel):
    q, k, v, alphas = draw(2, 5, 140, 32) * 2, draw(2, 5, 90, 32, seed=1), draw(2, 5, 90, 32, seed=2), ALPHAS[:5]
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v, alpha=torch.tensor(alphas).view(5, 1, 1))
        for head, alpha in enumerate(alphas):
            alone = sv.entmax_attention(q[:, head], k[:, head], v[:, head], alpha=alpha)
            assert torch.equal(out[:, head], alone)


@pytest.mark.usefixtures("without_pytorch")
@pytest.mark.parametrize("shape", ((), (1,), (1, 1, 1), (3, 1, 1), (2, 1, 1, 1), (2, 3, 1, 1)))
def test_every_shape_of_one_alpha_a_head(shape):
    q, k, v = (draw(2, 3, 30, 16, seed=s).requires_grad_() for s in range(3))
    alpha, scale = (torch.full(shape, x, requires_grad=True) for x in (1.4, 0.2))
    out = attend(q, k, v, alpha, scale)
    torch.testing.assert_close(out, attend(q, k, v, 1.4, 0.2), rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(out.pow(2).sum(), (q, alpha, scale))
    assert grads[1].shape == shape and grads[2].shape == shape and all(g.abs().sum() > 0 for g in grads)


@pytest.mark.usefixtures("without_pytorch")
def test_a_scale_of_zero_and_one_per_row_have_gradients():
    q, k, v, grad = (
        draw(2, 2, 20, 16),
        draw(2, 2, 30, 16, seed=1),
        draw(2, 2, 30, 16, seed=2),
        draw(2, 2, 20, 16, seed=3),
    )
    for scale in (torch.tensor([0.0, 0.3]).view(2, 1, 1), draw(2, 2, 20, 1, seed=4).abs(), draw(20, 1, seed=4) * 0):
        found = out_and_gradients(lambda *t: attend(*t[:3], 1.5, t[3]), (q, k, v, scale), grad)
        wide = [t.double().requires_grad_() for t in (q, k, v, scale)]
        whole = sv.entmax(wide[0] @ wide[1].mT * wide[3]) @ wide[2]
        check(found, (whole, *torch.autograd.grad(whole, wide, grad.double())))
        assert found[4].abs().sum() > 0


@every_kernel
def test_masks_and_rows_that_are_masked_throughout(kernel):
    q, k, v, grad = (
        draw(1, 2, 40, 16),
        draw(1, 2, 70, 16, seed=1),
        draw(1, 2, 70, 16, seed=2),
        draw(1, 2, 40, 16, seed=3),
    )
    alpha, scale = torch.tensor([1.3, 1.7]).view(2, 1, 1), torch.tensor([0.4, 0.6]).view(2, 1, 1)
    allowed = draw(40, 70, seed=4) > -0.5
    allowed[3] = False
    for mask in (allowed, torch.where(allowed, draw(40, 70, seed=5), -torch.inf)):

        def masked(q, k, v, alpha, scale, mask=mask):
            return sv.entmax_attention(q, k, v, alpha=alpha, scale=scale, attn_mask=mask)

        with cpu.using(kernel):
            found = out_and_gradients(masked, (q, k, v, alpha, scale), grad)
        check(found, out_and_gradients(masked, (q, k, v, alpha, scale), grad, torch.float64))


@pytest.mark.parametrize("alphas", ((1.5, 1.0), (1.04, 1.5), (1.5, 2.5)))
def test_one_head_out_of_range_sends_the_call_to_pytorch(alphas):
    tensors = (*(draw(1, 2, 20, 16, seed=s) for s in range(3)), torch.tensor(alphas).view(2, 1, 1))
    grad = draw(1, 2, 20, 16, seed=3)
    found = out_and_gradients(lambda *t: attend(*t, None), tensors, grad)
    with cpu.using("off"):
        expected = out_and_gradients(lambda *t: attend(*t, None), tensors, grad)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    for bad in (0.9, float("nan")):
        with pytest.raises(ValueError, match="every alpha must be a finite number >= 1"):
            attend(*tensors[:3], torch.tensor([1.5, bad]).view(2, 1, 1), None)


def test_alpha_per_row_goes_to_pytorch():
    q, k, v, grad = (draw(1, 2, 20, 16, seed=s) for s in range(4))
    alpha = torch.linspace(1.1, 1.9, 20).view(20, 1)
    assert not cpu.supports(q, k, v, alpha.expand(1, 2, 20, 1), 0.0)
    assert cpu.supports(q, k, v, alpha[:1].expand(1, 2, 1, 1), 0.0)
    found = out_and_gradients(lambda *t: attend(*t, None), (q, k, v, alpha), grad)
    check(found, out_and_gradients(lambda *t: attend(*t, None), (q, k, v, alpha), grad, torch.float64))


def test_bad_values_in_q_decline_as_without_alpha_per_head():
    q, k, v = (draw(1, 2, 20, 16, seed=s) for s in range(3))
    k[0, 1, 3, 2] = torch.nan
    alpha = torch.full((2, 1, 1), 1.5, requires_grad=True)
    out = attend(q, k, v, alpha, None)
    assert out[:, 0].isfinite().all() and out[:, 1].isnan().all()
    assert torch.autograd.grad(out[:, 0].sum(), alpha)[0][1].isnan()  # 0 · NaN, as torch has it


@pytest.mark.usefixtures("without_pytorch")
def test_gradients_of_alpha_and_scale_are_computed_where_asked_for(monkeypatch):
    asked, original = [], cpu.attention_gradients

    def noted(*args):
        asked.append(args[-2:])
        return original(*args)

    monkeypatch.setattr(cpu, "attention_gradients", noted)
    for needs in ((False, False), (True, False), (False, True)):
        q, k, v = (draw(1, 2, 20, 16, seed=s).requires_grad_() for s in range(3))
        alpha, scale = (torch.full((2, 1, 1), x, requires_grad=need) for x, need in zip((1.4, 0.2), needs, strict=True))
        attend(q, k, v, alpha, scale).sum().backward()
        assert asked[-1] == needs
        assert [t.grad is not None for t in (alpha, scale)] == list(needs)


def test_frozen_queries_keys_and_values_with_a_learnable_alpha():
    q, k, v = (draw(1, 2, 20, 16, seed=s) for s in range(3))
    alpha = torch.tensor([1.3, 1.6]).view(2, 1, 1).requires_grad_()
    (found,) = torch.autograd.grad(attend(q, k, v, alpha, None).pow(2).sum(), alpha)
    wide = alpha.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(attend(q.double(), k.double(), v.double(), wide, None).pow(2).sum(), wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_half_precision_with_learnable_alpha_in_float32():
    q, k, v = (draw(1, 2, 40, 32, seed=s).bfloat16().requires_grad_() for s in range(3))
    alpha = torch.tensor([1.3, 1.6], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    out = attend(q, k, v, alpha, None)
    grads = torch.autograd.grad(out.float().pow(2).sum(), (q, alpha))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, alpha)]
    expected = torch.autograd.grad(attend(*wide, None).pow(2).sum(), (wide[0], wide[3]))
    assert out.dtype == torch.bfloat16 and grads[0].dtype == torch.bfloat16 and grads[1].dtype == torch.float64
    torch.testing.assert_close(grads[1], expected[1], rtol=2e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_compiles_with_learnable_alpha_and_scale():
    q, k, v = (draw(1, 2, 20, 16, seed=s).requires_grad_() for s in range(3))
    alpha, scale = torch.tensor([1.3, 1.6]).view(2, 1, 1), torch.tensor([0.2, 0.4]).view(2, 1, 1)
    tensors = (q, k, v, alpha.requires_grad_(), scale.requires_grad_())

    def loss(*t):
        return attend(*t).pow(2).sum()

    torch._dynamo.reset()
    expected = torch.autograd.grad(loss(*tensors), tensors)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_functional_transforms_and_second_derivatives():
    q, k, v = (draw(1, 2, 12, 16, seed=s) for s in range(3))
    alpha = torch.tensor([1.3, 1.6]).view(2, 1, 1)

    def loss(alpha, q):
        return attend(q, k, v, alpha, None).pow(2).sum()

    wide = alpha.double().requires_grad_()
    k, v = k.double(), v.double()
    (expected,) = torch.autograd.grad(loss(wide, q.double()), wide, create_graph=True)
    second = torch.autograd.grad(expected.sum(), wide)[0]
    k, v = k.float(), v.float()
    torch.testing.assert_close(torch.func.grad(loss)(alpha, q).double(), expected, rtol=1e-4, atol=1e-5)
    each = torch.func.vmap(torch.func.grad(loss), (0, None))(torch.stack((alpha, alpha + 0.1)), q)
    torch.testing.assert_close(each[0].double(), expected, rtol=1e-4, atol=1e-5)
    leaf = alpha.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, q), leaf, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), leaf)[0].double(), second, rtol=2e-3, atol=1e-4)
    along = torch.func.jvp(lambda a: loss(a, q), (alpha,), (torch.ones_like(alpha),))[1]
    torch.testing.assert_close(along.double(), expected.sum(), rtol=1e-4, atol=1e-5)


def test_saved_survivors_and_a_new_search_agree():
    q, k, v, grad = (
        draw(1, 2, 140, 32),
        draw(1, 2, 200, 32, seed=1),
        draw(1, 2, 200, 32, seed=2),
        draw(1, 2, 140, 32, seed=3),
    )
    alpha, scale = torch.tensor([1.3, 1.8]).view(1, 2, 1, 1), torch.tensor([0.1, 0.5]).view(1, 2, 1, 1)
    saved = torch.full((cpu.saved_bytes(q, 200),), 255, dtype=torch.uint8)
    assert cpu.attention(q, k, v, None, alpha, scale, 0.0, 1.0, saved) is not None
    rest = (grad, q, k, v, None, alpha, scale, 0.0, 1.0)
    a = cpu.attention_gradients(*rest, saved, True, True)
    b = cpu.attention_gradients(*rest, torch.empty(0, dtype=torch.uint8), True, True)
    assert a is not None and b is not None
    for x, y in zip(a, b, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


def test_autograd_alone_takes_the_short_way(monkeypatch):
    """Neither the operator's dispatch nor the bound arguments of a separate setup_context: 50 µs of 70."""
    monkeypatch.setattr(attention_autograd, "_TiledAttentionFunctorch", None)
    monkeypatch.setattr(attention_autograd, "_TiledGradients", None)
    q = draw(1, 2, 12, 16).requires_grad_()
    assert torch.autograd.grad(sv.entmax_attention(q, q, q).sum(), q)[0].isfinite().all()
