"""Tiled entmax attention against whole matrices in float64: outputs, gradients, masks, edges, memory."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import selectivit as sv
from selectivit.ops import tiles
from selectivit.ops.kernels import cpu
from selectivit.ops.reference import attention_reference

INF = math.inf


@pytest.fixture(scope="module", autouse=True, params=("compiled kernel where it serves", "pure PyTorch"))
def _path(request):
    with cpu.using("off") if request.param == "pure PyTorch" else contextlib.nullcontext():
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 60)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(
    b=st.integers(1, 2),
    h=st.integers(1, 3),
    n=st.integers(1, 40),
    m=st.integers(1, 300),
    d=st.sampled_from((1, 5, 16, 64)),
    e=st.sampled_from((3, 16)),
    alpha=st.sampled_from((1.0, 1.2, 1.5, 2.0, 2.5)),
    mask=st.sampled_from((None, "bool", "additive", "key")),
    seed=st.integers(0, 99),
)
def test_equals_whole_matrices(b, h, n, m, d, e, alpha, mask, seed):
    q, k, v = draw(b, h, n, d, seed=seed), draw(b, h, m, d, seed=seed + 1), draw(b, h, m, e, seed=seed + 2)
    attn_mask = {
        None: None,
        "bool": draw(b, 1, n, m, seed=seed) > -0.5,
        "additive": draw(n, m, seed=seed),
        "key": draw(b, 1, 1, m, seed=seed) > -0.5,
    }[mask]
    out = sv.entmax_attention(q, k, v, alpha=alpha, attn_mask=attn_mask)
    expected = attention_reference(q, k, v, alpha=alpha, attn_mask=attn_mask)
    assert (out - expected).norm() <= 2e-5 * expected.norm() + 1e-6


@pytest.mark.usefixtures("small_tiles", "poisoned_empty")
@pytest.mark.parametrize("alpha", (1.0, 1.2, 1.5, 2.0))
def test_derivatives_over_several_tiles(alpha):
    q, k, v = (draw(2, 2, n, 3, seed=n, dtype=torch.float64).requires_grad_() for n in (5, 6, 6))
    k = draw(2, 2, 6, 3, seed=9, dtype=torch.float64).requires_grad_()
    mask = draw(2, 1, 5, 6) > -0.6

    def attend(q, k, v):
        return sv.entmax_attention(q, k, v, alpha=alpha, attn_mask=mask)

    assert gradcheck(attend, (q, k, v))
    assert gradgradcheck(attend, (q, k, v))


@pytest.mark.usefixtures("small_tiles", "poisoned_empty")
def test_derivatives_of_bias_alpha_and_scale_per_head():
    q, k, v = (draw(1, 2, 5, 3, seed=s, dtype=torch.float64).requires_grad_() for s in range(3))
    bias = draw(2, 5, 5, dtype=torch.float64).requires_grad_()
    alpha = torch.tensor([1.3, 1.6], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    scale = torch.tensor([0.5, 0.8], dtype=torch.float64).view(2, 1, 1).requires_grad_()

    def attend(q, k, v, bias, alpha, scale):
        return sv.entmax_attention(q, k, v, attn_mask=bias, alpha=alpha, scale=scale)

    assert gradcheck(attend, (q, k, v, bias, alpha, scale))
    assert gradgradcheck(attend, (q, k, v, bias, alpha, scale))


def test_frozen_queries_with_trainable_keys_and_values():
    q, k, v = (draw(1, 2, 5, 4, seed=s) for s in range(3))
    k.requires_grad_(), v.requires_grad_()
    sv.entmax_attention(q, k, v).square().sum().backward()
    assert q.grad is None and k.grad is not None and v.grad is not None and k.grad.abs().sum() > 0


def test_fully_masked_query_gives_zeros_and_no_gradient():
    q, k, v = (draw(1, 1, 3, 4, seed=s).requires_grad_() for s in range(3))
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    out = sv.entmax_attention(q, k, v, attn_mask=mask)
    assert (out[0, 0, 1] == 0).all()
    out.square().sum().backward()
    assert q.grad is not None and (q.grad[0, 0, 1] == 0).all() and torch.isfinite(q.grad).all()
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (sdpa[0, 0, 1] == 0).all()  # torch's own policy, which ours follows


@pytest.mark.parametrize("additive", (False, True))
def test_nan_in_a_hidden_key_does_not_leak(additive):
    q, k, v = (draw(1, 2, 4, 8, seed=s) for s in range(3))
    seen = torch.tensor([True, True, False, True])
    mask = torch.zeros(1, 4).masked_fill(~seen, -INF) if additive else seen[None]
    clean = sv.entmax_attention(q, k, v, attn_mask=mask)
    k[:, :, 2], v[:, :, 2] = math.nan, math.nan
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out = sv.entmax_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, clean)
    out.square().sum().backward()
    assert q.grad is not None and v.grad is not None
    assert torch.isfinite(q.grad).all() and (v.grad[:, :, 2] == 0).all()


def test_nan_in_a_seen_key_shows_in_every_row():
    q, k, v = (draw(1, 1, 3, 4, seed=s) for s in range(3))
    k[0, 0, 1, 0] = math.nan
    assert sv.entmax_attention(q, k, v).isnan().all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(dtype):
    q, k, v = (draw(1, 2, 50, 16, seed=s).to(dtype) for s in range(3))
    out = sv.entmax_attention(q, k, v)
    expected = attention_reference(q, k, v)
    assert out.dtype == dtype and (out - expected).norm() / expected.norm() < 1e-2


def test_empty_sequences_and_broadcast_heads():
    assert sv.entmax_attention(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)).shape == (
        1,
        2,
        0,
        4,
    )
    q, k, v = draw(2, 4, 5, 8), draw(2, 1, 6, 8), draw(2, 1, 6, 8)
    torch.testing.assert_close(
        sv.entmax_attention(q, k, v), sv.entmax_attention(q, k.expand(2, 4, 6, 8), v.expand(2, 4, 6, 8))
    )


def test_no_keys_at_all_gives_zeros():
    out = sv.entmax_attention(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 4))
    assert out.shape == (1, 2, 3, 4) and (out == 0).all()


@pytest.mark.filterwarnings("ignore")
def test_compiles_as_one_graph():
    q, k, v = (draw(1, 2, 9, 4, seed=s).requires_grad_() for s in range(3))

    def loss(q, k, v):
        return sv.entmax_attention(q, k, v, alpha=1.5).square().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", ("entmax", "attention"))
def test_registered_as_torch_expects(op):
    q, k, v = (draw(1, 2, 5, 4, seed=s) for s in range(3))
    if op == "entmax":
        torch.library.opcheck(torch.ops.selectivit.entmax.default, (draw(3, 7), 1.5, None), test_utils="test_schema")
        torch.library.opcheck(
            torch.ops.selectivit.entmax.default, (draw(3, 7), 1.5, None), test_utils="test_faketensor"
        )
    else:
        args = (q, k, v, None, None, None, 1.5, 0.5)
        torch.library.opcheck(torch.ops.selectivit.entmax_attention.default, args, test_utils="test_faketensor")
        back = (q, q[..., :1], q, k, v, None, None, None, 1.5, 0.5, True)
        torch.library.opcheck(
            torch.ops.selectivit.entmax_attention_backward.default, back, test_utils="test_faketensor"
        )


def test_vmap():
    q, k, v = draw(3, 2, 5, 4), draw(2, 6, 4), draw(2, 6, 4)
    each = torch.func.vmap(lambda t: sv.entmax_attention(t, k, v))(q)
    torch.testing.assert_close(each, torch.stack([sv.entmax_attention(t, k, v) for t in q]))


def test_bad_arguments():
    q = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"equal D and M, got q \(1, 2, 5, 4\), k \(1, 2, 5, 3\)"):
        sv.entmax_attention(q, q[..., :3], q)
    with pytest.raises(ValueError, match="leading"):
        sv.entmax_attention(q, q.expand(3, 2, 5, 4)[:, :1].expand(3, 1, 5, 4), torch.zeros(1, 3, 5, 4))
    with pytest.raises(TypeError, match=r"one floating dtype.*float64"):
        sv.entmax_attention(q, q.double(), q)
    with pytest.raises(ValueError, match=r"attn_mask of shape \(4, 5\)"):
        sv.entmax_attention(q, q, q, attn_mask=torch.ones(4, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match="attn_mask must be bool"):
        sv.entmax_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="alpha"):
        sv.entmax_attention(q, q, q, alpha=0.5)
