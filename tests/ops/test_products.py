"""The joined products against plain operators, and when each is used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from selectivit.ops.products import gated_product, onednn_serves, product

ONEDNN = torch.backends.mkldnn.is_available()


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(x, weight, bias, residual=None):
    out = x.double() @ weight.double().T + bias.double()
    return out if residual is None else out + residual.double()


@given(
    lead=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    i=st.integers(1, 20),
    o=st.integers(1, 20),
    with_residual=st.booleans(),
    grad=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)
def test_products_are_what_they_say(lead, i, o, with_residual, grad, dtype):
    x, weight, bias = draw(*lead, i, dtype=dtype), draw(o, i, seed=1, dtype=dtype), draw(o, seed=2, dtype=dtype)
    residual = draw(*lead, o, seed=3, dtype=dtype) if with_residual else None
    gate, gate_bias = draw(2 * o, i, seed=4, dtype=dtype), draw(2 * o, seed=5, dtype=dtype)
    with torch.set_grad_enabled(grad):
        out, gated = product(x, weight, bias, residual), gated_product(x, gate, gate_bias)
    a, b = plain(x, gate, gate_bias).chunk(2, -1)
    tolerance = 6e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), plain(x, weight, bias, residual), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gated.double(), F.silu(a) * b, atol=2 * tolerance, rtol=2 * tolerance)
    assert out.dtype == gated.dtype == dtype


@torch.no_grad()
def test_views_and_inputs_are_left_alone():
    x, weight, bias, residual = draw(2, 9, 12)[:, 3:, ::2], draw(5, 6), draw(5), draw(2, 6, 5)
    kept = residual.clone()
    torch.testing.assert_close(product(x, weight, bias, residual), plain(x, weight, bias, residual).float())
    assert torch.equal(residual, kept)


@pytest.mark.skipif(not ONEDNN, reason="a torch without oneDNN")
def test_when_the_joined_products_serve():
    x, weight, bias = draw(2, 4), torch.nn.Parameter(draw(3, 4)), draw(3)
    assert not onednn_serves(x, weight)  # gradients may be wanted
    with torch.no_grad():
        assert onednn_serves(x, weight)
        assert not onednn_serves(x.double(), weight.double()) and not onednn_serves(x.double(), weight)
        with torch.autocast("cpu", torch.bfloat16):
            assert not onednn_serves(x, weight)
            assert product(x, weight, bias).dtype == torch.bfloat16
        torch._C._set_mkldnn_enabled(False)  # what torch.backends.mkldnn.flags sets, without its warning on tf32
        try:
            assert not onednn_serves(x, weight)
        finally:
            torch._C._set_mkldnn_enabled(True)
        with FlopCounterMode(display=False) as counter:
            product(x, weight, bias)
        assert counter.get_total_flops() == 2 * 2 * 3 * 4
        torch.testing.assert_close(torch.vmap(lambda x: product(x, weight, bias))(x), F.linear(x, weight, bias))


@pytest.mark.skipif(not ONEDNN, reason="a torch without oneDNN")
def test_forward_mode_goes_through_plain_operators():
    x, weight, bias = draw(2, 4), draw(6, 4), draw(6)
    with torch.no_grad():
        _, tangent = torch.func.jvp(lambda x: gated_product(x, weight, bias), (x,), (torch.ones_like(x),))
    step = 1e-3
    above, below = (gated_product(x + sign * step, weight, bias) for sign in (1, -1))
    expected = (above - below) / (2 * step)
    torch.testing.assert_close(tangent, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("grad", [False, True])
def test_a_torch_without_the_operators_uses_plain_ones(monkeypatch, grad):
    class Bare:
        """A build of torch whose oneDNN room is empty."""

    monkeypatch.setattr(torch.ops, "mkldnn", Bare())
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = draw(2, 4, dtype=dtype), draw(6, 4, seed=1, dtype=dtype), draw(6, seed=2, dtype=dtype)
        residual = draw(2, 6, seed=3, dtype=dtype)
        with torch.set_grad_enabled(grad):
            assert not onednn_serves(x, weight)
            assert torch.equal(product(x, weight, bias, residual), residual + F.linear(x, weight, bias))
            a, b = F.linear(x, weight, bias).chunk(2, -1)
            assert torch.equal(gated_product(x, weight, bias), F.silu(a) * b)
