import math

import pytest
import torch

from selectivit.ops.selective import AttentionRule
from selectivit.vis.statistics import attention_statistics, mean_cosine


def qkv(heads=3, tokens=37, width=8):
    return (torch.randn(3, 2, heads, tokens, width, generator=torch.Generator().manual_seed(0)) * 2).unbind(0)


def test_agrees_with_the_entmax_package():
    entmax = pytest.importorskip("entmax")
    q, k, v = qkv()
    stats = attention_statistics(q, k, v, AttentionRule("entmax", alpha=1.5))
    weights = entmax.entmax15((q.double() @ k.double().mT) * 8**-0.5, dim=-1)
    entropy = torch.special.entr(weights).sum(-1)
    torch.testing.assert_close(stats.support_size, (weights > 0).double().sum(-1).mean((0, 2)))
    torch.testing.assert_close(stats.entropy, entropy.mean((0, 2)), atol=1e-5, rtol=0)
    torch.testing.assert_close(stats.effective_tokens, entropy.exp().mean((0, 2)), atol=1e-4, rtol=0)
    assert 0 < stats.support_share.max() < 0.9


@pytest.mark.parametrize("rows", [1, 10, 37, 1000])
def test_chunks_do_not_change_the_numbers(rows):
    q, k, v = qkv()
    rule = AttentionRule("entmax", alpha=1.5)
    whole, parts = attention_statistics(q, k, v, rule), attention_statistics(q, k, v, rule, rows=rows)
    torch.testing.assert_close(parts.support_size, whole.support_size)
    torch.testing.assert_close(parts.entropy, whole.entropy, atol=1e-6, rtol=0)


def test_uniform_attention_uses_every_token():
    q = torch.zeros(1, 2, 16, 4)
    stats = attention_statistics(q, q, q, AttentionRule("softmax"))
    assert stats.support_share.tolist() == [1, 1]
    assert stats.entropy.tolist() == pytest.approx([math.log(16)] * 2, abs=1e-5)
    assert stats.effective_tokens.tolist() == pytest.approx([16] * 2, abs=1e-3)


def test_values_alone_use_one_token():
    q, k, v = qkv()
    stats = attention_statistics(q, k, v, AttentionRule("softmax", scores="v"))
    assert stats.support_size.tolist() == [1, 1, 1] and stats.effective_tokens.tolist() == [1, 1, 1]


def test_a_sum_of_sources_is_measured_as_a_distribution():
    q, k, v = qkv()
    mean = attention_statistics(q, k, v, AttentionRule("entmax", scores="qq+kk", combine="mean"))
    total = attention_statistics(q, k, v, AttentionRule("entmax", scores="qq+kk", combine="sum"))
    torch.testing.assert_close(mean.entropy, total.entropy, atol=1e-6, rtol=0)


def test_masked_keys_are_outside_the_support():
    q, k, v = qkv()
    mask = torch.arange(37) < 10
    stats = attention_statistics(q, k, v, AttentionRule("softmax"), attn_mask=mask[None, :].expand(37, 37))
    assert stats.support_size.tolist() == [10, 10, 10]


def test_cosine_of_maps():
    a = torch.randn(8, 3, 3, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[:, 0, 0] *= -1
    assert mean_cosine([a, b]) == pytest.approx((7 / 9, -1))
    with pytest.raises(ValueError, match="one shape"):
        mean_cosine([a, a[:, :2]])
