"""The rule of attention: every source and normalizer against a direct computation; the controls."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from selectivit.ops import tiles
from selectivit.ops.normalizers import NORMALIZERS
from selectivit.ops.selective import SOFTMAX, AttentionRule, attention_weights, selective_attention

INF = math.inf
SOURCES = ("qk", "qq", "kk", "vv", "qq+kk", "qq+kk+vv", "v")


@pytest.fixture
def qkv():
    g = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, 3, 17, 8, generator=g) for _ in range(3))


def test_softmax_of_qk_is_the_fused_kernel_bit_for_bit(qkv):
    assert torch.equal(selective_attention(*qkv, SOFTMAX), F.scaled_dot_product_attention(*qkv))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("combine", ("mean", "sum"))
def test_output_is_the_weights_times_the_values(qkv, source, normalizer, combine):
    rule = AttentionRule(normalizer, alpha=1.3, scores=source, combine=combine, temperature=0.7)
    weights = attention_weights(*qkv, rule)
    rows = source.count("+") + 1 if combine == "sum" else 1
    torch.testing.assert_close(weights.sum(-1), torch.full((2, 3, 17), float(rows)))
    torch.testing.assert_close(selective_attention(*qkv, rule), weights @ qkv[2], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("source", ("qk", "qq", "kk", "vv"))
def test_sources_against_their_definition(qkv, source):
    projection = dict(zip("qkv", qkv, strict=True))
    scores = projection[source[0]] @ projection[source[1]].mT * 8**-0.5
    torch.testing.assert_close(attention_weights(*qkv, AttentionRule("softmax", scores=source)), scores.softmax(-1))


def test_sum_of_sources_adds_probabilities_not_scores(qkv):
    q, k, _ = qkv
    expected = (q @ q.mT * 8**-0.5).softmax(-1) + (k @ k.mT * 8**-0.5).softmax(-1)
    rule = AttentionRule("softmax", scores="qq+kk", combine="sum")
    torch.testing.assert_close(attention_weights(*qkv, rule), expected)


def test_value_only_does_not_mix(qkv):
    assert torch.equal(selective_attention(*qkv, AttentionRule(scores="v")), qkv[2])


def test_temperature_and_scale_multiply_the_scores(qkv):
    halves = attention_weights(*qkv, AttentionRule("softmax", temperature=0.5))
    torch.testing.assert_close(halves, attention_weights(*qkv, AttentionRule("softmax", scale=2.0)))
    per_head = torch.tensor([0.3, 1.0, 2.0])
    for normalizer in ("softmax", "entmax"):
        rule = AttentionRule(normalizer, scale=per_head)
        scaled = attention_weights(*qkv, rule)
        for h in range(3):
            one = AttentionRule(normalizer, scale=float(per_head[h]))
            torch.testing.assert_close(scaled[:, h], attention_weights(*qkv, one)[:, h], atol=1e-6, rtol=0)
        torch.testing.assert_close(selective_attention(*qkv, rule), scaled @ qkv[2], atol=1e-5, rtol=1e-4)


def test_alpha_per_head(qkv):
    rule = AttentionRule(alpha=torch.tensor([1.1, 1.5, 2.0]))
    weights = attention_weights(*qkv, rule)
    for h, alpha in enumerate((1.1, 1.5, 2.0)):
        one = attention_weights(*qkv, AttentionRule(alpha=alpha))[:, h]
        torch.testing.assert_close(weights[:, h], one, atol=2e-6, rtol=0)


def test_random_mask_has_entmax_support_size_and_follows_its_seed(qkv):
    sparse = attention_weights(*qkv, AttentionRule("entmax", alpha=1.5))
    masks = [attention_weights(*qkv, AttentionRule("random_mask", alpha=1.5, seed=s)) for s in (0, 0, 1)]
    assert torch.equal((masks[0] > 0).sum(-1), (sparse > 0).sum(-1))
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0] > 0, masks[2] > 0)
    assert not torch.equal(masks[0] > 0, sparse > 0)


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation inside returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def shared(a, b):
    """The share of a's support that b's support holds too, and what chance would give."""
    in_a, in_b = a > 0, b > 0
    chance = in_a.sum(-1) * in_b.float().mean(-1)
    return (in_a & in_b).sum() / in_a.sum(), chance.sum() / in_a.sum()


@pytest.fixture
def wide():
    g = torch.Generator().manual_seed(4)
    return tuple(torch.randn(2, 3, 150, 8, generator=g) for _ in range(3))


def test_random_masks_of_layers_heads_images_and_sources_are_independent(wide):
    q, k, v = (t[:1, :1].expand(2, 3, -1, -1) for t in wide)  # the same scores in every head and image
    rule = AttentionRule("random_mask")
    first = attention_weights(q, k, v, rule)
    layers = [attention_weights(q, k, v, dataclasses.replace(rule, layer=layer)) for layer in (1, 2)]
    source = attention_weights(q, q, q, AttentionRule("random_mask", scores="qq+qq", combine="sum"))
    again = attention_weights(q, q, q, AttentionRule("random_mask", scores="qq"))
    pairs = [(first, layers[0]), (*layers,), (first[0, 0], first[0, 1]), (first[0], first[1]), (again, source - again)]
    for a, b in pairs:
        found, expected = shared(a, b)
        assert abs(found - expected) < 0.02
    places = (first > 0).float().mean((0, 1, 2))
    assert (places - places.mean()).abs().max() < 0.1  # no key is preferred


def test_random_mask_over_tiles_and_heads_alone(wide, monkeypatch):
    rule = AttentionRule("random_mask", seed=-3)
    whole = selective_attention(*wide, rule)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2 * 3 * 150 * 7)
    torch.testing.assert_close(selective_attention(*wide, rule), whole)
    torch.testing.assert_close(attention_weights(*wide, rule) @ wide[2], whole)
    some = attention_weights(*wide, rule, queries=torch.tensor([149, 3, -1]))
    torch.testing.assert_close(some, attention_weights(*wide, rule)[:, :, [149, 3, 149]])


def test_random_mask_draws_for_a_tile_alone(wide, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2 * 3 * 150 * 7)
    with LargestTensor() as seen:
        selective_attention(*wide, AttentionRule("random_mask"))
    assert seen.numel == 2 * 3 * 150 * 8  # q, k, v and the output; a tile has 2 * 3 * 150 * 7


def test_random_mask_of_a_nan_row_and_of_a_hidden_one(wide):
    q, k, v = (t.clone() for t in wide)
    q[0, 0, 0, 0] = float("nan")
    mask = torch.ones(150, 1, dtype=torch.bool)
    mask[1] = False
    weights = attention_weights(q, k, v, AttentionRule("random_mask"), attn_mask=mask)
    assert weights[0, 0, 0].isnan().all() and (weights[:, :, 1] == 0).all()
    assert torch.isfinite(weights[:, :, 2:]).all()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("shape", ((17,), (17, 17), (17, 1), (1, 17), (3, 1, 17), (2, 1, 17, 17)))
def test_masks_broadcast_as_in_torch(qkv, normalizer, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
    full = mask.expand(2, 3, 17, 17).contiguous()
    for dtype in (torch.bool, torch.float32, torch.float64):
        given, wanted = (m if dtype == torch.bool else torch.zeros(m.shape, dtype=dtype).masked_fill(~m, -INF)
                         for m in (mask, full))  # fmt: skip
        rule = AttentionRule(normalizer)
        weights = attention_weights(*qkv, rule, attn_mask=given)
        torch.testing.assert_close(weights, attention_weights(*qkv, rule, attn_mask=wanted))
        torch.testing.assert_close(
            selective_attention(*qkv, rule, attn_mask=given), weights @ qkv[2], atol=2e-5, rtol=1e-4
        )


def test_softmax_of_a_fully_masked_row_is_zero_with_zero_gradient():
    scores = torch.tensor([[0.0, 1.0], [-INF, -INF]], requires_grad=True)
    p = NORMALIZERS["softmax"](scores)
    assert torch.equal(p[0], scores[0].softmax(-1)) and (p[1] == 0).all()
    p.square().sum().backward()
    assert scores.grad is not None and torch.isfinite(scores.grad).all() and (scores.grad[1] == 0).all()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_autocast_casts_as_for_torch(qkv, normalizer):
    q, k, v = qkv[0], qkv[1], qkv[2].bfloat16()
    rule = AttentionRule(normalizer)
    plain = [t.bfloat16() for t in qkv]
    expected, weights = selective_attention(*plain, rule), attention_weights(*plain, rule)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention_weights(q, k, v, rule), weights)
        out = selective_attention(q, k, v, rule)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(*plain))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_wrong_inputs_are_named(qkv, normalizer):
    q, k, v = qkv
    rule = AttentionRule(normalizer)
    with pytest.raises(ValueError, match="equal D and M"):
        selective_attention(q, k[..., :3], v, rule)
    with pytest.raises(TypeError, match="one floating dtype"):
        selective_attention(q, k.double(), v, rule)
    with pytest.raises(ValueError, match="does not broadcast"):
        selective_attention(q, k, v, rule, attn_mask=torch.ones(4, 5, dtype=torch.bool))


def test_sparsemax_is_entmax_with_alpha_2(qkv):
    rule = AttentionRule("sparsemax", alpha=1.2)
    assert rule.alpha == 2.0
    assert torch.equal(selective_attention(*qkv, rule), selective_attention(*qkv, AttentionRule(alpha=2.0)))


def test_random_mask_never_picks_what_is_masked(qkv):
    mask = torch.rand(17, 17, generator=torch.Generator().manual_seed(0)) > 0.5
    weights = attention_weights(*qkv, AttentionRule("random_mask"), attn_mask=mask)
    assert (weights[..., ~mask] == 0).all()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_chosen_query_rows_are_those_of_the_whole_map(qkv, normalizer):
    rule = AttentionRule(normalizer)
    whole = attention_weights(*qkv, rule)
    torch.testing.assert_close(attention_weights(*qkv, rule, queries=torch.tensor([3, 0])), whole[:, :, [3, 0]])
    torch.testing.assert_close(attention_weights(*qkv, rule, queries=slice(2, 5)), whole[:, :, 2:5])


def test_dropout_keeps_the_mean_and_zeroes_some(qkv):
    torch.manual_seed(0)
    rule = AttentionRule("entmax")
    plain = selective_attention(*qkv, rule)
    dropped = torch.stack([selective_attention(*qkv, rule, dropout_p=0.2) for _ in range(400)])
    assert not torch.equal(dropped[0], plain)
    assert (dropped.mean(0) - plain).abs().mean() < 0.05


def test_gradients_reach_every_projection():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=g).requires_grad_() for _ in range(3))
    selective_attention(q, k, v, AttentionRule(scores="qq+kk+vv")).square().sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in (q, k, v))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalizer": "relu"}, "unknown normalizer 'relu'"),
        ({"scores": "qx"}, "unknown score source 'qx'"),
        ({"scores": "qk+"}, "unknown score source"),
        ({"alpha": 0.5}, "alpha must be a finite number >= 1"),
        ({"alpha": float("nan")}, "alpha must be a finite number >= 1"),
        ({"combine": "max"}, "combine must be"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"scale": float("inf")}, "scale must be positive and finite"),
        ({"scale": float("nan")}, "scale must be positive and finite"),
        ({"scale": torch.tensor([1.0, float("inf")])}, "scale must be positive and finite"),
        ({"seed": 2**63}, "int64"),
    ],
)
def test_bad_rules(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionRule(**settings)


def test_self_correlation_between_different_sequences_is_refused():
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"3 queries and 5 keys; use 'qk'"):
        selective_attention(q, k, k, AttentionRule(scores="qq"))


def test_factor_of_the_wrong_number_of_heads(qkv):
    with pytest.raises(ValueError, match=r"one per head \(3\)"):
        selective_attention(*qkv, AttentionRule(scale=torch.ones(4)))
