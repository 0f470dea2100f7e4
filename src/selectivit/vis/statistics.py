"""How selective an attention layer is: support size, entropy and effective number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selectivit.ops.selective import AttentionRule, attention_weights


@dataclass(frozen=True)
class AttentionStatistics:
    """Averages over all queries of one layer, one value a head.

    Args:
        num_tokens: number of keys that a query may attend to.
        support_size: mean number of keys with a weight that is not exactly zero, (H,).
        entropy: mean entropy of a query's weights in nats, (H,).
        effective_tokens: mean of exp(entropy): the number of keys, weighted equally, with that entropy, (H,).
    """

    num_tokens: int
    support_size: Tensor
    entropy: Tensor
    effective_tokens: Tensor

    @property
    def support_share(self) -> Tensor:
        """The share of the weights that are not exactly zero, 0..1, (H,)."""
        return self.support_size / self.num_tokens


def attention_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    rows: int = 256,
) -> AttentionStatistics:
    """Measure one layer's attention without holding its (N, N) weights.

    Args:
        q: queries, (B, H, N, D).
        k: keys, (B, H, M, D).
        v: values, (B, H, M, D).
        rule: how scores become weights.
        scale: the host's factor on the scores; None is D**-0.5.
        attn_mask: True where a query may attend, or an additive float mask, broadcast to (B, H, N, M).
        rows: query rows held in memory at once.

    Returns:
        The statistics, a value a head, averaged over batch and queries, float64.

    Raises:
        ValueError: from the rule, where shapes or dtypes do not fit.

    Example:
        >>> from selectivit.ops.selective import AttentionRule
        >>> q = k = v = torch.randn(1, 2, 16, 8)
        >>> stats = attention_statistics(q, k, v, AttentionRule(normalizer="softmax"))
        >>> stats.support_share.tolist()
        [1.0, 1.0]
    """
    sums = torch.zeros(3, q.shape[1], dtype=torch.float64, device="cpu")
    for start in range(0, q.shape[2], rows):
        queries = slice(start, min(start + rows, q.shape[2]))
        weights = attention_weights(q, k, v, rule, scale=scale, attn_mask=attn_mask, queries=queries)  # (B, H, n, M)
        sums += _row_sums(weights).cpu()
    support, entropy, effective = sums / (q.shape[0] * q.shape[2])
    return AttentionStatistics(k.shape[2], support, entropy, effective)


def weight_statistics(weights: Tensor) -> AttentionStatistics:
    """Measure attention whose weights are at hand.

    Args:
        weights: (B, H, n, M), >= 0; rows are scaled to sum to 1 for the entropy.

    Returns:
        The statistics, a value a head, averaged over batch and queries, float64.

    Example:
        >>> weight_statistics(torch.tensor([[[[0.5, 0.5, 0.0, 0.0]]]])).support_share.tolist()
        [0.5]
    """
    support, entropy, effective = _row_sums(weights).cpu() / (weights.shape[0] * weights.shape[2])
    return AttentionStatistics(weights.shape[-1], support, entropy, effective)


def _row_sums(weights: Tensor) -> Tensor:
    """Sum support size, entropy and effective tokens of weights (B, H, n, M) over batch and queries: (3, H)."""
    support = weights.count_nonzero(dim=-1).double()  # (B, H, n)
    # A sum of several score sources gives rows that sum to their number, a row without a key sums to 0.
    shares = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    entropy = torch.special.entr(shares).sum(-1).double()  # 0 at a weight of 0
    return torch.stack([support, entropy, entropy.exp()]).sum(dim=(1, 3))


def mean_cosine(maps: Sequence[Tensor]) -> tuple[float, float]:
    """Compare two feature maps patch by patch.

    Args:
        maps: two maps, each (C, h, w).

    Returns:
        The mean and the least cosine similarity over the patches.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> a = torch.randn(8, 2, 3)
        >>> [round(c, 4) for c in mean_cosine([a, 2 * a])]
        [1.0, 1.0]
    """
    first, second = maps
    if first.shape != second.shape:
        raise ValueError(f"expected two maps of one shape, got {tuple(first.shape)} and {tuple(second.shape)}")
    cosine = torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=0)
    return cosine.mean().item(), cosine.min().item()
