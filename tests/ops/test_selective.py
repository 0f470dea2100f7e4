"""The rule of attention: every source and normalizer against a direct computation; the controls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from selectivit.ops.normalizers import NORMALIZERS
from selectivit.ops.selective import SOFTMAX, AttentionRule, attention_weights, selective_attention

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
