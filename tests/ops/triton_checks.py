"""The Triton kernels in Triton's interpreter, on CPU tensors; run by test_triton.py in a process of its own."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

import selectivit as sv
from selectivit.ops.kernels import cpu, triton, triton_plan
from selectivit.ops.reference import attention_reference

INF = math.inf
ALPHAS = (1.01, 1.1, 1.2, 1.5, 1.7, 2.0)
STRIP, PASSES = (9, 70), (12, 70)
pytestmark = [  # numpy's, of log(0), 0 · inf and inf − inf
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Serve CPU tensors; with the interpreter's product of bfloat16 mended, which multiplies their bits as integers."""
    from triton.runtime import interpreter

    def wide(t):
        if t.dtype.scalar.name != "bf16":
            return t
        bits = t.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    dot = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    )
    with triton.using("interpreter"):
        yield


@pytest.fixture(params=("strip", "three passes"))
def shape(request, monkeypatch):
    """(N, M) small enough for the interpreter, on either path."""
    monkeypatch.setattr(triton_plan, "SHORT", dict.fromkeys((2, 4), 1024 if request.param == "strip" else 0))
    return STRIP if request.param == "strip" else PASSES


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found, expected):
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def qkv(n, m, d=16, e=16, lead=(1, 2)):
    return draw(*lead, n, d), draw(*lead, m, d, seed=1), draw(*lead, m, e, seed=2)


def gradients(tensors, grad, dtype, **keywords):
    wide = {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}
    out = sv.entmax_attention(*(wide[c] for c in "qkv"), **keywords, **{c: t for c, t in wide.items() if c == "scale"})
    return out, torch.autograd.grad(out, list(wide.values()), grad.to(dtype))


def check_gradients(tensors, grad, tolerance=1e-4, **keywords):
    out, found = gradients(tensors, grad, torch.float32, **keywords)
    expected_out, expected = gradients(tensors, grad, torch.float64, **keywords)
    assert error(out, expected_out) <= 1e-5
    largest = max(t.norm().item() for t in expected)  # a gradient that is all but zero is rounding
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6 * largest


@pytest.mark.parametrize("alpha", ALPHAS)
def test_outputs_from_uniform_to_one_hot(shape, alpha):
    q, k, v = qkv(*shape, lead=())
    q, k = (q * 8).round() / 8, (k * 8).round() / 8  # few bits: the products are exact but for the spread
    spread = torch.tensor((1e-3, 1.0, 1e3)).repeat(len(q) // 3)
    q = q * spread[:, None]
    out = sv.entmax_attention(q, k, v, alpha=alpha)
    expected = attention_reference(q, k, v, alpha=alpha)
    for width in spread.unique():
        assert error(out[spread == width], expected[spread == width]) <= (1e-5 if width <= 1 else 1e-4)


@pytest.mark.parametrize(("alpha", "width"), list(zip(ALPHAS, (0.1, 4.0) * 3, strict=True)))
def test_gradients(shape, alpha, width):
    q, k, v = qkv(*shape, lead=(1, 1))
    check_gradients({"q": q * width, "k": k, "v": v}, draw(1, 1, shape[0], 16, seed=3), alpha=alpha)


@pytest.mark.parametrize("mask", ("bool", "additive", "key", "column", "bfloat16"))
def test_masks_are_broadcast_with_strides_of_zero(shape, mask):
    n, m = shape
    q, k, v = qkv(n, m, lead=(2, 2) if mask in ("bool", "key") else (1, 2))
    attn_mask = {
        "bool": draw(2, 1, n, m, seed=4) > -0.5,
        "additive": draw(n, m, seed=4).masked_fill(draw(n, m, seed=5) > 1, -INF),
        "key": draw(2, 1, 1, m, seed=4) > -0.5,
        "column": draw(m, n, seed=4).T > -0.5,
        "bfloat16": draw(2, n, m, seed=4).bfloat16(),
    }[mask]
    check_gradients({"q": q, "k": k, "v": v}, draw(*q.shape[:2], n, 16, seed=3), attn_mask=attn_mask)


@pytest.mark.parametrize("lead", ((), (2, 1, 2)))
def test_leading_dims_and_odd_widths(lead):
    q, k, v = qkv(*STRIP, d=24, e=5, lead=lead)
    check_gradients({"q": q, "k": k, "v": v}, draw(*lead, STRIP[0], 5, seed=3), alpha=1.37)


@pytest.mark.parametrize(("n", "m"), ((1, 1), (1, 64), (64, 65), (65, 63), (17, 257)))
def test_odd_sizes(n, m):
    q, k, v = qkv(n, m)
    check_gradients({"q": q, "k": k, "v": v}, draw(1, 2, n, 16, seed=3))


@pytest.mark.parametrize("d", (72, 128))
def test_wide_heads(d):
    q, k, v = qkv(5, 90, d=d, e=d)
    check_gradients({"q": q, "k": k, "v": v}, draw(1, 2, 5, d, seed=3))


def test_strided_and_expanded_inputs(shape):
    n, m = shape
    packed = draw(2, m, 3, 2, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    for a, b, c in (
        (q[:, :, :n], k, v),
        (q[:, :, :n], k[:1, :1].expand(2, 2, m, 16), v),
        (q[..., :n, ::2], k[..., ::2], v),
    ):
        assert error(sv.entmax_attention(a, b, c), attention_reference(a, b, c)) <= 1e-5


def test_scale_of_heads_and_its_gradient(shape):
    q, k, v = qkv(*shape)
    for scale in (torch.tensor([0.05, 2.0]).view(2, 1, 1), draw(1, 2, shape[0], 1, seed=6).abs()):
        check_gradients({"q": q, "k": k, "v": v, "scale": scale}, draw(1, 2, shape[0], 16, seed=3))


def test_views_whose_memory_holds_the_other_sign(shape):
    q, k, v = (torch.complex(t, t).conj().imag for t in qkv(*shape))
    assert q.is_neg()
    mask = torch.complex(draw(*shape, seed=4), draw(*shape, seed=5)).conj().imag
    out = sv.entmax_attention(q, k, v, attn_mask=mask)
    plain = [t.resolve_neg() for t in (q, k, v, mask)]
    assert error(out, attention_reference(*(t.double() for t in plain[:3]), attn_mask=plain[3].double())) <= 1e-5


def test_scale_of_zero_has_a_gradient():
    q, k, v = qkv(5, 20)
    check_gradients({"q": q, "k": k, "v": v, "scale": torch.zeros(2, 1, 1)}, draw(1, 2, 5, 16, seed=3))


@pytest.mark.parametrize("alpha", (1.01, 1.5, 2.0))
def test_rows_at_the_edge_follow_the_policy(shape, alpha):
    n, m = shape
    attend = functools.partial(sv.entmax_attention, alpha=alpha)
    tensors = [t.requires_grad_() for t in qkv(n, m)]
    mask = draw(n, m, seed=3)
    mask[1] = -INF
    mask[2, 5], mask[3, 6] = math.nan, INF
    out = attend(*tensors, attn_mask=mask)
    assert (out[..., 1, :] == 0).all() and out[..., 2:4, :].isnan().all()
    assert out[..., 0, :].isfinite().all() and out[..., 4:, :].isfinite().all()
    dq, dk, _ = torch.autograd.grad(out.sum(), tensors)
    assert (dq[..., 1, :] == 0).all() and dq[..., 2:4, :].isnan().all() and dq[..., 4:, :].isfinite().all()
    assert dk.isnan().any()
    nothing = attend(*tensors, attn_mask=torch.zeros(n, m, dtype=torch.bool))
    assert (nothing == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(nothing.sum(), tensors))


def test_what_the_mask_hides_does_not_leak(shape):
    n, m = shape
    q, k, v = qkv(n, m)
    k[..., 7, 3], v[..., 7, 2], q[..., 4, 0] = math.nan, math.nan, math.nan
    mask = torch.ones(n, m, dtype=torch.bool)
    mask[:, 7], mask[4] = False, False
    seen = [i for i in range(m) if i != 7]
    tensors = [t.requires_grad_() for t in (q, k, v)]
    out = sv.entmax_attention(*tensors, attn_mask=mask)
    expected = attention_reference(q, k[..., seen, :], v[..., seen, :])
    rows = [i for i in range(n) if i != 4]
    assert error(out[..., rows, :], expected[..., rows, :]) <= 1e-5 and (out[..., 4, :] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), tensors))
    assert sv.entmax_attention(q, k, v, attn_mask=mask.logical_or(mask[:, :1])).isnan().any()


def test_nan_and_infinity_that_are_seen(shape):
    q, k, v = (t.abs() for t in qkv(*shape))
    for bad in (math.nan, INF):
        k[..., 7, 3] = bad
        assert sv.entmax_attention(q, k, v).isnan().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision(shape, dtype):
    tensors = [t.to(dtype).requires_grad_() for t in qkv(*shape)]
    out = sv.entmax_attention(*tensors)
    assert out.dtype == dtype and error(out, attention_reference(*tensors)) <= 1e-2
    found = torch.autograd.grad(out.float().square().sum(), tensors)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(sv.entmax_attention(*wide).square().sum(), wide)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype and error(a, b) <= 2e-2


@pytest.fixture
def small_blocks(monkeypatch):
    """16 rows a block and two blocks of keys a bit."""
    plans = triton_plan.Plan(16, 16, 0, group=2, warps=1, stages=1), triton_plan.BackwardPlan(16, 32, 16, 16, 1, 1)
    monkeypatch.setattr(triton, "plan_forward", lambda q, v: plans[0])
    monkeypatch.setattr(triton, "plan_backward", lambda q, v: plans[1])


def test_a_bit_may_stand_for_several_blocks_of_keys(small_blocks):
    q, k, v = qkv(20, 100, lead=())
    check_gradients({"q": q * 6, "k": k, "v": v}, draw(20, 16, seed=3))


@pytest.mark.slow
def test_a_bit_may_stand_for_several_blocks_of_queries(small_blocks):
    q, k, v = qkv(1030, 40, lead=())  # 65 blocks, two to a bit
    check_gradients({"q": q * 6, "k": k, "v": v}, draw(1030, 16, seed=3))


def test_dead_groups_of_keys_are_left_out(monkeypatch):
    q, k, v = qkv(12, 64 * 5, lead=())
    k[64:192] *= 1e-3
    k[64:192] -= 9 * q.mean(0)
    q[:] = q.mean(0)
    saved = torch.zeros(triton.saved_bytes(q, v), dtype=torch.uint8)
    triton.attention(q, k, v, None, None, 1.5, 1.0, saved)
    words = triton._parts(saved, q, v, triton_plan.plan_forward(q, v))[0]
    live = (sv.entmax(q @ k.T) > 0).view(12, 5, 64).any(0).any(-1)
    assert [bool(words[0] >> i & 1) for i in range(5)] == live.tolist() and 0 < live.sum() < 5
    assert words[0] >> 5 == 0


def test_every_output_is_written(shape, poisoned_empty):
    q, k, v = qkv(*shape, lead=())
    check_gradients({"q": q, "k": k, "v": v}, draw(shape[0], 16, seed=3))


def test_second_derivatives_and_vmap_go_on_from_the_kernels():
    q, k, v = (t.requires_grad_() for t in qkv(*STRIP))

    def curvature(*tensors):
        first = torch.autograd.grad(sv.entmax_attention(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    for a, b in zip(curvature(q, k, v), curvature(*wide), strict=True):
        assert error(a, b) <= 1e-4
    one = torch.func.vmap(torch.func.grad(lambda a: sv.entmax_attention(a, k[0], v[0]).square().sum()))(q.detach())
    torch.testing.assert_close(one, torch.func.grad(lambda a: sv.entmax_attention(a, k, v).square().sum())(q.detach()))


def test_gradient_of_a_mask_comes_from_pytorch():
    q, k, v = qkv(9, 70)
    mask = draw(9, 70, seed=4)

    def of_mask(dtype):
        m = mask.to(dtype).requires_grad_()
        out = sv.entmax_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=m)
        return torch.autograd.grad(out.square().sum(), m)[0]

    assert error(of_mask(torch.float32), of_mask(torch.float64)) <= 1e-4


def test_the_operator_agrees_with_its_fake():
    tensors = [t.requires_grad_() for t in qkv(9, 70)]
    *_, saved = torch.ops.selectivit.entmax_attention(*tensors, None, None, None, 1.5, 0.25, True)
    torch.library.opcheck(
        torch.ops.selectivit.entmax_attention.default,
        (*(t.detach() for t in tensors), None, None, None, 1.5, 0.25, True),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert saved.numel() == triton.saved_bytes(tensors[0], tensors[2])


def test_two_runs_are_bitwise_the_same():
    q, k, v = qkv(*STRIP)
    grad = draw(1, 2, STRIP[0], 16, seed=3)
    first, second = (gradients({"q": q, "k": k, "v": v}, grad, torch.float32) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_the_kernels_and_nothing_else_were_tested(monkeypatch):
    calls = []
    attention = triton.attention
    monkeypatch.setattr(triton, "attention", lambda *a: calls.append(a) or attention(*a))
    monkeypatch.setattr(cpu, "attention", lambda *_: pytest.fail("the compiled CPU kernel served"))
    sv.entmax_attention(*qkv(9, 70))
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), ((70, 577), (130, 1100)))
@pytest.mark.parametrize("alpha", (1.2, 1.5, 2.0))
def test_sizes_of_images(n, m, alpha):
    q, k, v = qkv(n, m, d=64, e=64)
    check_gradients({"q": q, "k": k, "v": v}, draw(1, 2, n, 64, seed=3), alpha=alpha)
