"""Core attention against dense attention under its mask: outputs, gradients, shapes, dtypes, what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import selectivit as sv
from selectivit.ops.core_attention import core_mask, core_weights, rule_of
from selectivit.ops.reference import attention_reference
from selectivit.ops.selective import AttentionRule

NORMALIZERS = {"softmax": 1.0, "entmax15": 1.5, "sparsemax": 2.0, 1.2: 1.2}


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(q, k, v, num_cores, alpha, scale=None):
    return attention_reference(q, k, v, alpha=alpha, attn_mask=core_mask(num_cores, q.shape[-2]), scale=scale)


def close(found, expected, tolerance=2e-5):
    assert found.shape == expected.shape and (found - expected).norm() <= tolerance * expected.norm() + 1e-6


@given(
    b=st.integers(1, 2),
    h=st.integers(1, 3),
    c=st.integers(1, 9),
    n=st.integers(0, 40),
    d=st.sampled_from((1, 4, 16, 64)),
    e=st.sampled_from((3, 16)),
    normalizer=st.sampled_from(list(NORMALIZERS)),
    seed=st.integers(0, 99),
)
def test_equals_dense_attention_under_its_mask(b, h, c, n, d, e, normalizer, seed):
    q, k, v = (draw(b, h, c + n, w, seed=seed + i) for i, w in enumerate((d, d, e)))
    close(sv.core_attention(q, k, v, c, normalizer), dense(q, k, v, c, NORMALIZERS[normalizer]))


@given(c=st.integers(1, 5), n=st.integers(0, 12), normalizer=st.sampled_from(list(NORMALIZERS)), seed=st.integers(0, 9))
def test_gradients_equal_those_of_dense_attention(c, n, normalizer, seed):
    ours = [draw(2, 2, c + n, 4, seed=seed + i, dtype=torch.float64).requires_grad_() for i in range(3)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    weights = draw(2, 2, c + n, 4, seed=seed + 5, dtype=torch.float64)
    (sv.core_attention(*ours, c, normalizer) * weights).sum().backward()
    mask = core_mask(c, c + n)
    scores = (theirs[0] @ theirs[1].mT / 2).masked_fill(~mask, -math.inf)
    ((sv.entmax(scores, NORMALIZERS[normalizer]) @ theirs[2]) * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("normalizer", ["softmax", "entmax15"])
def test_gradcheck(normalizer):
    q, k, v = (draw(1, 2, 6, 4, seed=i, dtype=torch.float64).requires_grad_() for i in range(3))
    assert gradcheck(lambda q, k, v: sv.core_attention(q, k, v, 2, normalizer), (q, k, v))


@pytest.mark.usefixtures("poisoned_empty")
def test_every_row_is_written():
    q, k, v = (draw(2, 3, 20, 8, seed=i) for i in range(3))
    for normalizer in NORMALIZERS:
        assert sv.core_attention(q, k, v, 5, normalizer).isfinite().all()


def test_joining_the_heads_copies_nothing():
    q, k, v = (draw(2, 3, 20, 8, seed=i) for i in range(3))
    out = sv.core_attention(q, k, v, 5)
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


def test_scale_and_rules_reach_both_calls():
    q, k, v = (draw(1, 2, 12, 8, seed=i) for i in range(3))
    close(sv.core_attention(q, k, v, 4, scale=0.7), dense(q, k, v, 4, 1.0, scale=0.7))
    rule = AttentionRule("entmax", alpha=torch.tensor([1.2, 1.7]), temperature=0.5)
    expected = [dense(q[:, i], k[:, i], v[:, i], 4, a, scale=2 * 8**-0.5) for i, a in enumerate((1.2, 1.7))]
    close(sv.core_attention(q, k, v, 4, rule), torch.stack(expected, 1))


def test_any_number_of_leading_dims():
    q, k, v = (draw(2, 1, 3, 10, 4, seed=i) for i in range(3))
    close(sv.core_attention(q, k, v, 3), dense(q, k, v, 3, 1.0))
    close(sv.core_attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], 3), dense(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], 3, 1.0))


@pytest.mark.parametrize("normalizer", ["softmax", "entmax15"])
def test_bfloat16_and_autocast(normalizer):
    q, k, v = (draw(1, 2, 30, 16, seed=i) for i in range(3))
    expected = dense(q, k, v, 6, NORMALIZERS[normalizer])
    half = sv.core_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 6, normalizer)
    with torch.autocast("cpu", torch.bfloat16):
        cast = sv.core_attention(q, k, v, 6, normalizer)
    assert half.dtype == cast.dtype == torch.bfloat16
    for found in (half, cast):
        close(found.double(), expected, 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cores", [1, 5, 16])
def test_training_in_half_precision_writes_small_scores_out(monkeypatch, dtype, cores):
    """No fused kernel, whose backward is slow on CPU: also of a copied rule, also under autocast."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    half = [draw(2, 3, 24, 16, seed=i).to(dtype).requires_grad_() for i in range(3)]
    exact = [t.detach().double().requires_grad_() for t in half]
    mask, weights = core_mask(cores, 24), draw(2, 3, 24, 16, seed=5).to(dtype)
    expected = (exact[0] @ exact[1].mT * 0.4).masked_fill(~mask, -math.inf).softmax(-1) @ exact[2]
    (expected * weights.double()).sum().backward()
    for rule in ("softmax", copy.deepcopy(rule_of("softmax"))):
        found = sv.core_attention(*half, cores, rule, scale=0.4)
        grads = torch.autograd.grad((found * weights).sum(), half)
        assert found.dtype == dtype
        close(found.double(), expected, 1e-2)
        for grad, other in zip(grads, exact, strict=True):
            assert other.grad is not None
            close(grad.double(), other.grad, 1e-2)
    wide = [t.detach().float().requires_grad_() for t in half]
    with torch.autocast("cpu", dtype):
        cast = sv.core_attention(*wide, cores, scale=0.4)
    assert torch.equal(cast, found)
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(cast.sum(), wide))


def test_other_training_and_inference_stay_fused(monkeypatch):
    calls, fused = [], F.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args[0].shape[-2])
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    half = [draw(1, 2, 40, 4, seed=i).bfloat16().requires_grad_() for i in range(3)]
    wide = [t.detach().float().requires_grad_() for t in half]
    sv.core_attention(*wide, 8)
    with torch.no_grad():
        sv.core_attention(*half, 8)
    sv.core_attention(*(t.detach() for t in half), 8)
    sv.core_attention(*half, 17)  # more scores a token than four times its width
    hotter = AttentionRule("softmax", alpha=1.0, temperature=2.0)
    sv.core_attention(*half, 8, hotter)
    assert calls == [8, 32, 8, 32, 8, 32, 17, 23, 8, 32]


@pytest.mark.parametrize("normalizer", ["softmax", "entmax15"])
def test_compiled(normalizer):
    torch.compiler.reset()
    leaves = [draw(1, 2, 14, 8, seed=i).requires_grad_() for i in range(3)]

    def attend(q, k, v):
        return sv.core_attention(q, k, v, 4, normalizer)

    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves)
    close(out, dense(*leaves, 4, NORMALIZERS[normalizer]))
    found = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.compiler.reset()


def test_weights_are_the_cores_rows():
    q, k, v = (draw(1, 2, 12, 8, seed=i) for i in range(3))
    for normalizer in NORMALIZERS:
        weights = core_weights(q, k, 4, normalizer)
        assert weights.shape == (1, 2, 4, 12)
        close(weights @ v, sv.core_attention(q, k, v, 4, normalizer)[:, :, :4])


def test_what_is_refused():
    q = draw(1, 2, 6, 8)
    for num_cores in (0, -1, 7):
        with pytest.raises(ValueError, match=f"expected 1 to 6 cores, .* got num_cores={num_cores}"):
            sv.core_attention(q, q, q, num_cores)
    with pytest.raises(ValueError, match=r"over the same L tokens, got q \(1, 2, 6, 8\), k \(1, 2, 5, 8\)"):
        sv.core_attention(q, q[:, :, 1:], q, 2)
    with pytest.raises(ValueError, match="unknown normalizer 'entmax': use 'softmax', 'entmax15', 'sparsemax'"):
        sv.core_attention(q, q, q, 2, "entmax")
    with pytest.raises(ValueError, match="expected scores 'qk', got 'qq'"):
        sv.core_attention(q, q, q, 2, AttentionRule("softmax", scores="qq"))
    with pytest.raises(ValueError, match="alpha"):
        sv.core_attention(q, q, q, 2, 0.5)
    with pytest.raises(TypeError, match="one floating dtype"):
        sv.core_attention(q, q.double(), q, 2)
    assert rule_of(1).normalizer == "softmax"
