"""The compiled CPU kernel against float64 by bisection: outputs, gradients, masks, strides, edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import selectivit as sv
from selectivit.ops.kernels import cpu, library
from selectivit.ops.reference import attention_reference

INF = math.inf
KERNELS = [*cpu.names(), *(f"{name} float32" for name in cpu.names()[:1])]
pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no compiled CPU kernel: {cpu.status()}")
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def error(found, expected):
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def gradients(attend, tensors, grad, dtype):
    wide = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = attend(*wide)
    return out, torch.autograd.grad(out, wide, grad.to(dtype))


@every_kernel
@given(
    lead=st.sampled_from(((), (2,), (1, 3), (2, 1, 2))),
    n=st.integers(1, 300),
    m=st.integers(1, 600),
    d=st.sampled_from((1, 16, 24, 64, 80, 128, 256)),
    e=st.sampled_from((3, 16, 64, 96)),
    alpha=st.sampled_from((1.05, 1.2, 1.37, 1.5, 1.75, 2.0)),
    width=st.sampled_from((1e-3, 0.03, 0.3, 1.0, 5.0, 30.0)),
    seed=st.integers(0, 99),
)
def test_outputs_from_one_hot_to_uniform(kernel, lead, n, m, d, e, alpha, width, seed):
    q, k, v = draw(*lead, n, d, seed=seed) * width, draw(*lead, m, d, seed=seed + 1), draw(*lead, m, e, seed=seed + 2)
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v, alpha=alpha)
    assert error(out, attention_reference(q, k, v, alpha=alpha)) <= 1e-5 * max(1.0, width / 5)  # q·k itself rounds


@every_kernel
@pytest.mark.parametrize("spread", (1e-3, 1.0, 1e3))
def test_scores_spread_over_six_orders(kernel, spread):
    q, k, v = draw(1, 2, 70, 64), draw(1, 2, 500, 64, seed=1), draw(1, 2, 500, 64, seed=2)
    q = (q * spread * 8).to(torch.bfloat16).float()  # few bits, so that the products are exact and only the row counts
    k = k.to(torch.bfloat16).float()
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v)
    assert error(out, attention_reference(q, k, v)) <= (1e-5 if spread <= 1 else 1e-4)


@every_kernel
@given(
    n=st.integers(1, 150),
    m=st.integers(1, 400),
    d=st.sampled_from((5, 16, 64)),
    alpha=st.sampled_from((1.2, 1.37, 1.5, 1.75)),
    width=st.sampled_from((0.1, 1.0, 6.0)),
    mask=st.sampled_from((None, "bool", "additive", "key")),
    seed=st.integers(0, 99),
)
def test_gradients(kernel, n, m, d, alpha, width, mask, seed):
    tensors = draw(2, 2, n, d, seed=seed) * width, draw(2, 2, m, d, seed=seed + 1), draw(2, 2, m, 32, seed=seed + 2)
    grad = draw(2, 2, n, 32, seed=seed + 3)
    attn_mask = {
        None: None,
        "bool": draw(2, 1, n, m, seed=seed) > -0.5,
        "additive": draw(n, m, seed=seed),
        "key": draw(2, 1, 1, m, seed=seed) > -0.5,
    }[mask]

    def attend(q, k, v):
        return sv.entmax_attention(q, k, v, alpha=alpha, attn_mask=attn_mask)

    with cpu.using(kernel):
        out, found = gradients(attend, tensors, grad, torch.float32)
    expected_out, expected = gradients(attend, tensors, grad, torch.float64)
    assert error(out, expected_out) <= 1e-5
    largest = max(t.norm().item() for t in expected)  # a gradient that is all but zero is rounding
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6 * largest


@every_kernel
@given(
    n=st.integers(1, 150),
    m=st.integers(1, 600),
    d=st.sampled_from((3, 16, 24, 64, 80, 128)),
    e=st.sampled_from((5, 16, 48, 64, 128)),
    alpha=st.sampled_from((1.05, 1.2, 1.25, 1.37, 1.5)),
    width=st.sampled_from((0.003, 0.03, 0.1, 0.3)),
    mask=st.sampled_from((None, "bool", "additive", "key", "rows")),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_where_most_keys_survive(kernel, n, m, d, e, alpha, width, mask, seed):
    tensors = draw(1, 3, n, d, seed=seed) * width, draw(1, 3, m, d, seed=seed + 1), draw(1, 3, m, e, seed=seed + 2)
    grad = draw(1, 3, n, e, seed=seed + 3)
    attn_mask = {
        None: None,
        "bool": draw(1, 3, n, m, seed=seed) > -2,
        "additive": draw(n, m, seed=seed) * width,
        "key": draw(1, 1, 1, m, seed=seed) > -2,
        "rows": (draw(n, 1, seed=seed) > -1).expand(n, m),
    }[mask]

    def attend(q, k, v):
        return sv.entmax_attention(q, k, v, alpha=alpha, attn_mask=attn_mask)

    with cpu.using(kernel):
        out, found = gradients(attend, tensors, grad, torch.float32)
    expected_out, expected = gradients(attend, tensors, grad, torch.float64)
    assert error(out, expected_out) <= 1e-5
    largest = max(t.norm().item() for t in expected)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6 * largest


@every_kernel
@pytest.mark.parametrize("alpha", (1.2, 1.5))
def test_gradients_over_many_blocks_of_every_density(kernel, alpha):
    width = torch.logspace(-2, 1.5, 260)[:, None]  # from all keys to a few, within one unit and across them
    tensors = draw(1, 2, 260, 64) * width, draw(1, 2, 300, 64, seed=1), draw(1, 2, 300, 64, seed=2)
    grad = draw(1, 2, 260, 64, seed=3)

    def attend(q, k, v):
        return sv.entmax_attention(q, k, v, alpha=alpha)

    with cpu.using(kernel):
        out, found = gradients(attend, tensors, grad, torch.float32)
    expected_out, expected = gradients(attend, tensors, grad, torch.float64)
    assert error(out, expected_out) <= 1e-5
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) <= 1e-4


def test_thresholds_are_kept_where_the_lists_outgrow_their_room():
    q, k, v = draw(1, 1, 40, 16), draw(1, 1, 200, 16, seed=1), draw(1, 1, 200, 16, seed=2)
    for width, kept in ((0.01, -2), (3.0, 0)):  # kThresholdsOnly of saved.h; lists begin at 0
        saved = torch.full((cpu.saved_bytes(q, 200),), 255, dtype=torch.uint8)
        assert cpu.attention(q * width, k, v, None, None, None, 1.5, 0.25, saved) is not None
        assert saved.view(torch.int64)[0] == kept


@every_kernel
def test_nan_in_v_stays_with_the_rows_that_attend_to_it(kernel):
    q, k, v = draw(1, 1, 40, 64) * 0.01, draw(1, 1, 300, 64, seed=1), draw(1, 1, 300, 64, seed=2)
    v[0, 0, 7] = math.nan
    mask = torch.ones(40, 300, dtype=torch.bool)
    mask[10:14, 7] = False  # every other row attends to all keys
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v, attn_mask=mask)
        dq, _, dv = torch.autograd.grad(out[0, 0, 10:14].sum(), (q, k, v))
    assert out[0, 0, 10:14].isfinite().all() and out[0, 0, :10].isnan().all() and out[0, 0, 14:].isnan().all()
    assert dq[0, 0, 10:14].isfinite().all() and dv.isfinite().all()


@every_kernel
def test_sparsemax_gradients_inside_a_support(kernel):
    q, k, v = draw(1, 2, 40, 16), draw(1, 2, 90, 16, seed=1), draw(1, 2, 90, 16, seed=2)
    grad = draw(1, 2, 40, 16, seed=3)
    with cpu.using(kernel):
        _, found = gradients(lambda *t: sv.entmax_attention(*t, alpha=2.0), (q, k, v), grad, torch.float32)
    _, expected = gradients(lambda *t: sv.entmax_attention(*t, alpha=2.0), (q, k, v), grad, torch.float64)
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) <= 1e-4


@every_kernel
@pytest.mark.parametrize("alpha", (1.2, 1.5, 2.0))
def test_bound_of_the_screen_holds_for_outliers_and_ties(kernel, alpha):
    q, k, v = draw(1, 1, 64, 64), draw(1, 1, 700, 64, seed=1), draw(1, 1, 700, 64, seed=2)
    k[..., 7] += 40  # one dimension far from the rest, as in trained models
    k[0, 0, 5] *= 30
    k[0, 0, 100:200] = k[0, 0, 99]
    q[0, 0, 3] = 0
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v, alpha=alpha)
    assert error(out, attention_reference(q, k, v, alpha=alpha)) <= 2e-5


def test_saved_survivors_and_a_new_search_give_the_same_gradients():
    tensors = draw(1, 2, 140, 32) * 0.2, draw(1, 2, 200, 32, seed=1), draw(1, 2, 200, 32, seed=2)
    for width in (1.0, 40.0):  # lists that outgrow their room, and lists that fit
        q, k, v = tensors[0] * width, *tensors[1:]
        size = cpu.saved_bytes(q, 200)
        saved = torch.full((size,), 255, dtype=torch.uint8)
        found = cpu.attention(q, k, v, None, None, None, 1.5, 0.2, saved)
        assert found is not None
        grad = draw(1, 2, 140, 32, seed=4)
        a = cpu.attention_gradients(grad, q, k, v, None, None, None, 1.5, 0.2, saved)
        b = cpu.attention_gradients(grad, q, k, v, None, None, None, 1.5, 0.2, torch.empty(0, dtype=torch.uint8))
        assert a is not None and b is not None
        for x, y in zip(a[:3], b[:3], strict=True):
            assert torch.equal(x, y)


def test_room_for_survivors_is_what_the_library_lays_out():
    compiled = library.resolved()[0]
    for heads, n, m in ((1, 1, 1), (6, 257, 257), (12, 1370, 40), (3, 4097, 4097), (2, 128, 129)):
        assert cpu.saved_bytes(torch.empty(heads, n, 8), m) == compiled.selectivit_saved_bytes(heads, n, m)


@every_kernel
def test_strided_expanded_and_transposed_inputs(kernel):
    packed = draw(2, 50, 3, 4, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    columns = draw(16, 50).T.expand(2, 4, 50, 16)
    with cpu.using(kernel):
        for a, b, c in (
            (q, k, v),
            (q, k[:1, :1].expand(2, 4, 50, 16), v),
            (columns, k, v),
            (q, k[:, :, ::2], v[:, :, ::2]),
        ):
            out = sv.entmax_attention(a, b, c)
            assert error(out, attention_reference(a, b, c)) <= 1e-5
            assert out.is_contiguous()


@every_kernel
def test_gradients_of_strided_and_expanded_inputs_and_gradients(kernel):
    packed = draw(2, 50, 3, 4, 24)  # 24: padded to 32
    wide = packed.double().requires_grad_()
    packed.requires_grad_()
    weights = torch.arange(24.0)
    with cpu.using(kernel):
        for reduce in (
            lambda out: out.sum(),  # one number, expanded
            lambda out: (out * weights).sum(),  # rows expanded
            lambda out: (out.mT.flatten() * draw(out.numel(), seed=3)).sum(),  # transposed
        ):
            found, expected = (torch.autograd.grad(reduce(attend_packed(t)), t)[0] for t in (packed, wide))
            assert error(found, expected) <= 1e-5


def attend_packed(packed):
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    return sv.entmax_attention(q, k[:, :1].expand_as(k), v)


def test_views_that_torch_negates_when_it_reads_them():
    q, k, v = (torch.complex(draw(1, 2, 20, 16, seed=s), draw(1, 2, 20, 16, seed=s + 3)).conj().imag for s in range(3))
    mask = torch.complex(draw(20, 20), draw(20, 20, seed=1)).conj().imag
    assert q.is_neg() and mask.is_neg()
    out = sv.entmax_attention(q, k, v, attn_mask=mask, scale=torch.ones(1))
    torch.testing.assert_close(
        out, sv.entmax_attention(*(t.clone() for t in (q, k, v)), attn_mask=mask.clone(), scale=1)
    )


@every_kernel
def test_scale_per_head_and_its_gradient(kernel):
    q, k, v = draw(2, 3, 40, 16), draw(2, 3, 50, 16, seed=1), draw(2, 3, 50, 16, seed=2)
    scale = torch.tensor([0.1, 0.5, 2.0]).view(3, 1, 1)
    grad = draw(2, 3, 40, 16, seed=3)

    def attend(q, k, v, scale):
        return sv.entmax_attention(q, k, v, scale=scale)

    with cpu.using(kernel):
        out, found = gradients(attend, (q, k, v, scale), grad, torch.float32)
    expected_out, expected = gradients(attend, (q, k, v, scale), grad, torch.float64)
    assert error(out, expected_out) <= 1e-5
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) <= 1e-4


@every_kernel
def test_edge_rows_follow_the_policy(kernel):
    q, k, v = draw(1, 1, 20, 16), draw(1, 1, 40, 16, seed=1), draw(1, 1, 40, 16, seed=2)
    mask = draw(20, 40, seed=3)
    mask[1] = -INF
    mask[2, 5], mask[3, 6] = math.nan, INF
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v, attn_mask=mask)
        assert (out[0, 0, 1] == 0).all() and out[0, 0, 2:4].isnan().all() and out[0, 0, 4:].isfinite().all()
        masked = sv.entmax_attention(q, k, v, attn_mask=torch.zeros(20, 40, dtype=torch.bool))
        assert (masked == 0).all()
        bad = k.clone()
        bad[0, 0, 7, 3] = math.nan
        assert sv.entmax_attention(q, bad, v).isnan().all()
        bad[0, 0, 7, 3] = INF
        assert sv.entmax_attention(q.abs(), bad, v).isnan().all()
        hidden = torch.ones(1, 40, dtype=torch.bool)
        hidden[0, 7] = False
        assert sv.entmax_attention(q, bad, v, attn_mask=hidden).isfinite().all()


@every_kernel
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision(kernel, dtype):
    q, k, v = (draw(1, 2, 80, 64, seed=s).to(dtype).requires_grad_() for s in range(3))
    with cpu.using(kernel):
        out = sv.entmax_attention(q, k, v)
    assert out.dtype == dtype and error(out, attention_reference(q, k, v)) <= 1e-2
    for g in torch.autograd.grad(out.float().square().sum(), (q, k, v)):
        assert g.dtype == dtype and g.isfinite().all()


@pytest.mark.parametrize("shape", ((0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4)))
def test_empty_dims(shape):
    q = torch.zeros(shape, requires_grad=True)
    alpha, scale = torch.full((shape[1], 1, 1), 1.5, requires_grad=True), torch.ones(1, requires_grad=True)
    out = sv.entmax_attention(q, q, q, alpha=alpha, scale=scale)
    assert out.shape == shape
    for g, t in zip(torch.autograd.grad(out.sum(), (q, alpha, scale)), (q, alpha, scale), strict=True):
        assert g.shape == t.shape and (g == 0).all()


@pytest.mark.parametrize(("m", "e"), ((0, 3), (5, 0)))
def test_no_keys_or_values_without_width(m, e):
    q, k, v = (torch.zeros(1, 2, n, d, requires_grad=True) for n, d in ((4, 8), (m, 8), (m, e)))
    out = sv.entmax_attention(q, k, v, alpha=torch.full((2, 1, 1), 1.5))
    assert out.shape == (1, 2, 4, e) and (out == 0).all()
    for g, t in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert g.shape == t.shape and (g == 0).all()


def test_what_is_not_covered_goes_to_pytorch():
    q = draw(1, 1, 5, 16)
    assert cpu.supports(q, q, q, None, 1.5)
    assert not cpu.supports(q.double(), q.double(), q.double(), None, 1.5)
    assert not cpu.supports(q, q, q, None, 1.0) and not cpu.supports(q, q, q, None, 2.5)
    assert not cpu.supports(q, q, q, torch.full((1, 1, 5, 1), 1.5), 0.0)
    assert cpu.supports(q, q, q, torch.full((1, 1, 1, 1), 1.5), 0.0)
    wide = draw(1, 1, 5, 300)
    assert not cpu.supports(wide, wide, q, None, 1.5)
    with cpu.using("off"):
        assert not cpu.supports(q, q, q, None, 1.5)
        plain = sv.entmax_attention(q, q, q)
    torch.testing.assert_close(sv.entmax_attention(q, q, q), plain)


@given(
    rows=st.integers(1, 20),
    n=st.integers(1, 900),
    alpha=st.sampled_from((1.05, 1.2, 1.37, 1.5, 2.0)),
    width=st.sampled_from((1e-3, 0.1, 1.0, 10.0, 1e3)),
    seed=st.integers(0, 99),
)
@every_kernel
def test_rows(kernel, rows, n, alpha, width, seed):
    from selectivit.ops.reference import entmax_reference

    x = draw(rows, n, seed=seed) * width
    x[0, : n // 2] = -INF
    with cpu.using(kernel):
        p = sv.entmax(x, alpha)
    assert (p - entmax_reference(x, alpha)).abs().sum(-1).max() <= 2e-5
    assert (p.sum(-1) - 1).abs().max() <= 1e-5


@every_kernel
def test_rows_at_the_edge(kernel):
    x = draw(6, 200)
    x[0], x[1, 3], x[2, 199], x[3, 0] = -INF, math.nan, INF, -INF
    x[4] = 0
    with cpu.using(kernel):
        p = sv.entmax(x)
    assert (p[0] == 0).all() and p[1:3].isnan().all() and p[3, 0] == 0
    torch.testing.assert_close(p[4], torch.full((200,), 1 / 200))
