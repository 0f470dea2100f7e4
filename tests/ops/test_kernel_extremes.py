"""The compiled CPU kernel at the ends of float32 and on unusual layouts, against float64."""

from __future__ import annotations

import pytest
import torch

import selectivit as sv
from selectivit.ops.kernels import cpu
from selectivit.ops.reference import attention_reference

KERNELS = [*cpu.names(), *(f"{name} float32" for name in cpu.names()[:1])]
pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no compiled CPU kernel: {cpu.status()}")
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found, expected):
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@every_kernel
@pytest.mark.parametrize("alpha", (1.2, 1.5, 2.0))
@pytest.mark.parametrize("added", (torch.finfo(torch.float32).min, -1e12))
def test_rows_whose_every_key_is_put_far_below_are_uniform(kernel, alpha, added):
    q, k, v = (draw(1, 2, 40, 64, seed=s).requires_grad_() for s in range(3))
    mask = torch.zeros(40, 40)
    mask[5], mask[6, :30] = added, added  # beside such numbers every score vanishes
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v, alpha=alpha, attn_mask=mask)
        found = torch.autograd.grad(out.sum(), v)[0]
    wide = v.double().detach().requires_grad_()
    expected = attention_reference(q, k, wide, alpha=alpha, attn_mask=mask.clamp_min(-1e30))
    uniform = v[0].mean(-2)
    torch.testing.assert_close(out[0, :, 5], uniform)
    rest = torch.arange(40) != 5
    assert error(out[:, :, rest], expected[:, :, rest]) <= 1e-5
    assert found.sum().item() == pytest.approx(out.numel(), rel=1e-4)


@every_kernel
@pytest.mark.parametrize("scale", (1e6, 1e9, 1e15))
def test_scores_beyond_the_whole_numbers_of_float32_are_one_hot(kernel, scale):
    q, k, v = (draw(1, 2, 50, 16, seed=s) for s in range(3))
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v, scale=scale)
    torch.testing.assert_close(out, v.gather(-2, (q @ k.mT).argmax(-1, keepdim=True).expand_as(q)))


@every_kernel
@pytest.mark.parametrize("width", (16, 24))
def test_heads_that_lie_innermost_in_memory(kernel, width):
    q, k, v = (draw(2, n, width, 3, seed=s).permute(0, 3, 1, 2) for s, n in enumerate((40, 50, 50)))
    grad = draw(2, 40, width, 3, seed=3).permute(0, 3, 1, 2)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v)
        found = torch.autograd.grad(out, (q, k, v), grad)
    expected = sv.entmax_attention(*wide)
    assert error(out, expected) <= 1e-5
    for a, b in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert error(a, b) <= 1e-4


@every_kernel
def test_gradient_of_alpha_on_rows_that_are_all_but_uniform(kernel):
    q, k, v, grad = (draw(1, 64, n, 64, seed=i) for i, n in enumerate((1, 500, 500, 1)))
    q *= 0.01
    a = torch.full((64, 1, 1), 1.4, requires_grad=True)
    wide = a.detach().double().requires_grad_()
    with cpu.using(kernel):
        found = torch.autograd.grad(sv.entmax_attention(q, k, v, alpha=a), a, grad)[0]
    out = sv.entmax_attention(q.double(), k.double(), v.double(), alpha=wide)
    assert error(found, torch.autograd.grad(out, wide, grad.double())[0]) <= 4e-6  # 7e-6 if y is not centred


@every_kernel
@pytest.mark.parametrize("alpha", (1.1, 1.2))
def test_alpha_beside_a_whole_power(kernel, alpha):
    q, k, v = draw(1, 2, 40, 64), draw(1, 2, 300, 64, seed=1), draw(1, 2, 300, 64, seed=2)
    for step in (1e-6, -1e-6, 1.9e-6):
        with cpu.using(kernel):
            out = sv.entmax_attention(q, k, v, alpha=alpha + step)
        assert error(out, attention_reference(q, k, v, alpha=alpha + step)) <= 4e-6


@every_kernel
@pytest.mark.parametrize("alpha", (1.5, 1.75))
def test_gradients_of_large_scores_beside_rows_that_outgrow_the_lists(kernel, alpha):
    q, k, v, grad = (draw(1, 1, n, 64, seed=i) for i, n in enumerate((128, 700, 700, 128)))
    q *= 0.01
    q[:, :, :15] *= 1e6  # scores of 1e4, in a unit that keeps thresholds alone
    q, k = q.bfloat16().float(), k.bfloat16().float()  # few bits: what is tested is not the rounding of the products
    tensors = [t.requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    with cpu.using(kernel):
        found = torch.autograd.grad(sv.entmax_attention(*tensors, alpha=alpha), v, grad)[0]
    expected = torch.autograd.grad(sv.entmax_attention(*wide, alpha=alpha), wide[2], grad.double())[0]
    assert error(found, expected) <= 2e-5
