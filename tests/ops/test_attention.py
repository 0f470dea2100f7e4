"""Tiled entmax attention against whole matrices in float64: outputs, gradients, masks, edges, memory."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

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
        back = (q, q[..., :1], q, k, v, None, None, None, 1.5, 0.5, [True, False, False])
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
    with pytest.raises(ValueError, match=r"alpha of shape \(7,\) does not broadcast to .* = \(1, 2, 5, 1\)"):
        sv.entmax_attention(q, q, q, alpha=torch.full((7,), 1.5))
    with pytest.raises(ValueError, match=r"scale of shape \(7,\) does not broadcast"):
        sv.entmax_attention(q, q, q, scale=torch.ones(7))
    with pytest.raises(ValueError, match="D >= 1"):
        sv.entmax_attention(q[..., :0], q[..., :0], q)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="one floating dtype"):
        sv.entmax_attention(q, q.double(), q)  # autocast leaves float64 alone, for torch's attention too


def test_arguments_of_another_kind():
    q = torch.zeros(1, 2, 5, 4)
    attend: Any = sv.entmax_attention
    with pytest.raises(TypeError, match="takes 3 positional arguments"):
        attend(q, q, q, torch.ones(5, 5, dtype=torch.bool))  # the mask and all behind it go by name
    with pytest.raises(TypeError, match="is_causal"):
        attend(q, q, q, is_causal=True)
    with pytest.raises(TypeError, match="attn_mask must be a tensor or None, got bool"):
        attend(q, q, q, attn_mask=True)
    with pytest.raises(TypeError, match=r"alpha must be a number or a tensor, got \[1.5, 1.2\]"):
        attend(q, q, q, alpha=[1.5, 1.2])
    with pytest.raises(TypeError, match="alpha must be a number or a tensor, got None"):
        attend(q, q, q, alpha=None)
    with pytest.raises(TypeError, match="scale must be a number or a tensor, got 'large'"):
        attend(q, q, q, scale="large")


def test_one_number_per_head_of_another_shape_says_how_to_reshape():
    q = torch.zeros(3, 2, 5, 4)
    with pytest.raises(ValueError, match=r"alpha of shape \(2,\) .*: pass alpha.view\(2, 1, 1\)"):
        sv.entmax_attention(q, q, q, alpha=torch.full((2,), 1.5))
    with pytest.raises(ValueError, match=r"scale of shape \(3, 2\) .*: pass scale\[:, :, None, None\]"):
        sv.entmax_attention(q, q, q, scale=torch.ones(3, 2))
    ok = torch.full((3, 2), 1.5)[:, :, None, None]
    assert sv.entmax_attention(q, q, q, alpha=ok).shape == q.shape


def test_devices_that_differ():
    q, elsewhere = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4, device="meta")
    with pytest.raises(ValueError, match="q, k and v must be on one device"):
        sv.entmax_attention(q, elsewhere, q)
    with pytest.raises(ValueError, match="attn_mask is on meta, q on cpu: move it"):
        sv.entmax_attention(q, q, q, attn_mask=elsewhere[..., :1].bool())
    for name in ("alpha", "scale"):
        with pytest.raises(ValueError, match=f"{name} is on meta, q on cpu: move it"):
            sv.entmax_attention(q, q, q, **{name: elsewhere[0, :, :1, :1]})


class Storages(TorchDispatchMode):
    """Notes the largest storage behind any tensor that an operation inside returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


def loss(q, k, v):
    return sv.entmax_attention(q, k, v).pow(3).sum()


def first_derivatives(how, q, k, v):
    if how == "create_graph":
        q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
        return torch.autograd.grad(loss(q, k, v), (q, k, v), create_graph=True)
    if how == "func.grad":
        return torch.func.grad(loss, (0, 1, 2))(q, k, v)
    if how == "vmap of grad":
        return torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    return torch.func.jvp(loss, (q, k, v), (q, k, v))[1:]


@pytest.mark.parametrize("how", ("create_graph", "func.grad", "vmap of grad", "jvp"))
def test_first_derivatives_by_any_way_hold_no_whole_matrix(how, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1 << 16)
    q, k, v = (draw(2, 2, 1000, 8, seed=s) for s in range(3))
    wide = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(loss(*wide), wide)
    with Storages() as seen:
        found = first_derivatives(how, q, k, v)
    whole = 2 * 2 * 1000 * 1000 * 4  # bytes; what the compiled kernel saves is half at most
    assert seen.largest < 0.7 * whole
    if how == "jvp":
        expected = (sum((g * t).sum() for g, t in zip(expected, (q, k, v), strict=True)),)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.usefixtures("small_tiles", "poisoned_empty")
def test_forward_mode_of_every_input():
    q, k, v = (draw(1, 2, n, 3, seed=n, dtype=torch.float64).requires_grad_() for n in (4, 5, 5))
    bias = draw(2, 4, 5, dtype=torch.float64).requires_grad_()
    alpha = torch.tensor([1.3, 1.6], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    scale = torch.tensor([0.5, 0.8], dtype=torch.float64).view(2, 1, 1).requires_grad_()

    def attend(q, k, v, bias, alpha, scale):
        return sv.entmax_attention(q, k, v, attn_mask=bias, alpha=alpha, scale=scale)

    assert gradcheck(attend, (q, k, v, bias, alpha, scale), check_forward_ad=True)


@pytest.mark.usefixtures("small_tiles")
def test_hessians_agree_whichever_mode_goes_outside():
    q, k, v = (draw(1, 2, n, 3, seed=n, dtype=torch.float64) for n in (4, 5, 5))
    mask = draw(4, 5) > -1

    def loss(q):
        return sv.entmax_attention(q, k, v, attn_mask=mask).pow(3).sum()

    expected = torch.autograd.functional.hessian(loss, q)
    forward, reverse = torch.func.jacfwd, torch.func.jacrev
    for outer, inner in ((forward, reverse), (reverse, forward), (reverse, reverse)):
        torch.testing.assert_close(outer(inner(loss))(q), expected)
    with pytest.raises(NotImplementedError, match=r"jacfwd\(jacrev\)"):
        forward(forward(loss))(q)


@pytest.mark.parametrize("dtype", (torch.bool, torch.bfloat16, torch.float32))
def test_a_broadcast_mask_stays_small(dtype, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1 << 15)
    q, k, v = (draw(2, 2, 4, 300, 8, seed=s) for s in range(3))
    mask = (draw(2, 1, 300, 300) > 0).to(dtype)
    with Storages() as seen:
        out = sv.entmax_attention(q[0], k[0], v[0], attn_mask=mask)
    assert seen.largest <= mask.numel() * 4  # float32, and no copy for every head
    with Storages() as seen:
        found = torch.func.vmap(lambda q, k, v: sv.entmax_attention(q, k, v, attn_mask=mask))(q, k, v)
    assert seen.largest <= 2 * mask.numel() * 4
    torch.testing.assert_close(found[0], out)
    with Storages() as seen:
        tiles.without_hidden_keys(k[0], v[0], mask.expand(2, 4, 300, 300))
    assert seen.largest <= mask.untyped_storage().nbytes()


@pytest.mark.parametrize("alpha", (1.5, 2.0))
def test_float64_mask_beside_float32(alpha):
    q, k, v = (draw(1, 2, 6, 8, seed=s).requires_grad_() for s in range(3))
    mask = draw(6, 6, dtype=torch.float64)
    out = sv.entmax_attention(q, k, v, alpha=alpha, attn_mask=mask)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, attention_reference(q, k, v, alpha=alpha, attn_mask=mask).float())
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    again = sv.entmax_attention(q, k, v, alpha=alpha, attn_mask=mask.float()).square().sum()
    torch.testing.assert_close(dq, torch.autograd.grad(again, q)[0])


def test_gradients_without_keys_are_zero():
    q, k, v = (torch.ones(1, 2, n, 4, requires_grad=True) for n in (3, 0, 0))
    alpha, scale = (torch.full((2, 1, 1), x, requires_grad=True) for x in (1.5, 0.5))
    sv.entmax_attention(q, k, v, alpha=alpha, scale=scale).sum().backward()
    for t in (q, k, v, alpha, scale):
        assert t.grad is not None and t.grad.shape == t.shape and (t.grad == 0).all()


def test_autocast_casts_inputs_and_keeps_scores_in_float32():
    q, k, v = (draw(1, 2, 40, 16, seed=s) for s in range(3))
    plain = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    expected = sv.entmax_attention(*plain)
    grads = torch.autograd.grad(expected.float().square().sum(), plain)
    wide = [t.requires_grad_() for t in (q, k, v.bfloat16())]
    with torch.autocast("cpu", torch.bfloat16):
        out = sv.entmax_attention(*wide)
        found = torch.autograd.grad(out.float().square().sum(), wide)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ("entmax", "attention"))
def test_compiles_once_for_any_shape(op):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(t):
        return sv.entmax(t) if op == "entmax" else sv.entmax_attention(t, t.sin(), t, alpha=1.3)

    torch._dynamo.reset()
    compiled = torch.compile(run, dynamic=True, fullgraph=True, backend="aot_eager")
    counted = torch.compile(run, dynamic=True, fullgraph=True, backend=count)
    for shape in ((2, 3, 9, 8), (4, 5, 17, 8)):  # the head's width is a constant, 1/√D being one
        t = draw(*shape).requires_grad_()
        torch.testing.assert_close(counted(t), run(t))
        expected, found = run(t), compiled(t)
        torch.testing.assert_close(found, expected)
        weight = draw(*expected.shape, seed=1)
        (a,), (b,) = (torch.autograd.grad((x * weight).sum(), t) for x in (found, expected))
        torch.testing.assert_close(a, b)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ("entmax", "attention"))
def test_exports_with_a_dynamic_length(op):
    class Model(torch.nn.Module):
        def forward(self, t):
            return sv.entmax(t) if op == "entmax" else sv.entmax_attention(t, t, t)

    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(Model(), (draw(1, 2, 9, 8),), dynamic_shapes=({2: length},))
    longer = draw(1, 2, 33, 8)
    torch.testing.assert_close(program.module()(longer), Model()(longer))
