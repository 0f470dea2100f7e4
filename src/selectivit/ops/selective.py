"""One rule of attention: where scores come from and how they become probabilities. Every swap and map uses it."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .attention import check_attention_inputs, entmax_attention
from .entmax import check_alpha, working_dtype
from .normalizers import NORMALIZERS, seeded_noise
from .scores import score_pairs
from .tiles import masked_scores, query_tiles

COMBINATIONS = ("mean", "sum")


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionRule:
    """How a layer attends: normalizer and score source, with their numbers.

    Args:
        normalizer: "softmax", "entmax", "sparsemax" or "random_mask".
        alpha: entmax's α ≥ 1; a number or a (heads,) tensor.
        scores: "qk", "qq", "kk", "vv", a sum such as "qq+kk", or "v" (no mixing).
        scale: factor on the scores on top of the host's own 1/√D; a positive number or a (heads,) tensor; None is 1.
        temperature: > 0; divides the scores.
        combine: of a sum's several attention maps, their "mean" (rows sum to 1) or their "sum".
        seed: of the random mask.

    Raises:
        ValueError: a name or number outside these.

    Example:
        >>> AttentionRule("entmax", alpha=1.2, scores="qq+kk").combine
        'mean'
    """

    normalizer: str = "entmax"
    alpha: float | Tensor = 1.5
    scores: str = "qk"
    scale: float | Tensor | None = None
    temperature: float = 1.0
    combine: str = "mean"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.normalizer not in NORMALIZERS:
            raise ValueError(f"unknown normalizer {self.normalizer!r}: use one of {', '.join(NORMALIZERS)}")
        for alpha in self.alpha.flatten().tolist() if isinstance(self.alpha, Tensor) else [self.alpha]:
            check_alpha(alpha)
        score_pairs(self.scores)
        if self.combine not in COMBINATIONS:
            raise ValueError(f"combine must be 'mean' or 'sum', got {self.combine!r}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be a positive number, got {self.temperature}")
        if self.scale is not None and not bool((torch.as_tensor(self.scale) > 0).all()):
            raise ValueError(
                f"scale must be positive: it multiplies the scores before the normalizer, got {self.scale}"
            )


SOFTMAX = AttentionRule("softmax", alpha=1.0)


def selective_attention(
    q: Float[Tensor, "*lead n d"],
    k: Float[Tensor, "*lead m d"],
    v: Float[Tensor, "*lead m e"],
    rule: AttentionRule,
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Float[Tensor, "*lead n e"]:
    """Attend by a rule. Softmax of qk is torch's fused kernel itself; entmax never holds an (N, M) matrix.

    Args:
        q: (B, H, N, D).
        k: (B, H, M, D).
        v: (B, H, M, E).
        rule: score source and normalizer.
        scale: the host's factor on q·k; None is 1/√D. The rule's own scale comes on top.
        attn_mask: bool, True = may attend, or additive; broadcast to (B, H, N, M).
        dropout_p: dropout on the probabilities; the caller passes 0 outside training.

    Returns:
        (B, H, N, E).

    Raises:
        ValueError: shapes that do not fit, or self-correlation scores between sequences of different length.

    Example:
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> selective_attention(q, k, v, AttentionRule("entmax", alpha=1.5)).shape
        torch.Size([1, 2, 5, 8])
    """
    _check_self_correlation(q, k, rule)
    pairs = _pairs(q, k, v, rule)
    if not pairs:
        return v
    outputs = [_attend(a, b, v, rule, _factor(rule, a, scale), attn_mask, dropout_p) for a, b in pairs]
    return outputs[0] if len(outputs) == 1 else sum(outputs[1:], outputs[0]) / _divisor(rule, outputs)


def attention_weights(
    q: Float[Tensor, "*lead n d"],
    k: Float[Tensor, "*lead m d"],
    v: Float[Tensor, "*lead m e"],
    rule: AttentionRule,
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    queries: slice | Tensor | None = None,
) -> Float[Tensor, "*lead rows m"]:
    """The probabilities themselves, as `selective_attention` applies them.

    Args:
        q: (B, H, N, D).
        k: (B, H, M, D).
        v: (B, H, M, E).
        rule: score source and normalizer.
        scale: the host's factor on q·k; None is 1/√D.
        attn_mask: bool, True = may attend, or additive; broadcast to (B, H, N, M).
        queries: rows wanted, a slice or an index tensor; None is all.

    Returns:
        (B, H, rows, M) float32 (float64 for float64 inputs).

    Example:
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> attention_weights(q, k, v, SOFTMAX, queries=slice(0, 1)).sum(-1)
        tensor([[[1.],
                 [1.]]])
    """
    check_attention_inputs(q, k, v, attn_mask)
    _check_self_correlation(q, k, rule)
    rows = slice(None) if queries is None else queries
    pairs, work = _pairs(q, k, v, rule), working_dtype(q)
    if not pairs:
        n = v.shape[-2]
        return torch.eye(n, dtype=work, device=v.device)[rows].expand(*v.shape[:-2], -1, n)
    mask = attn_mask[..., rows, :] if attn_mask is not None and attn_mask.shape[-2] > 1 else attn_mask
    noise = None
    if rule.normalizer == "random_mask":
        noise = seeded_noise((*q.shape[-3:-1], k.shape[-2]), rule.seed, q)[..., rows, :]
    maps = []
    for a, b in pairs:
        scores = masked_scores(a[..., rows, :].to(work), b.to(work), mask, _factor(rule, a, scale))
        maps.append(NORMALIZERS[rule.normalizer](scores, alpha=_per_head(rule.alpha, scores), noise=noise))
    return maps[0] if len(maps) == 1 else sum(maps[1:], maps[0]) / _divisor(rule, maps)


def _attend(
    a: Tensor, b: Tensor, v: Tensor, rule: AttentionRule, factor: float | Tensor, mask: Tensor | None, dropout_p: float
) -> Tensor:
    if rule.normalizer == "softmax":
        if isinstance(factor, Tensor):  # the fused kernel knows one factor for all heads
            a, factor = (a.to(factor.dtype) * factor).to(a.dtype), 1.0
        return F.scaled_dot_product_attention(a, b, v, attn_mask=mask, dropout_p=dropout_p, scale=factor)
    if rule.normalizer in ("entmax", "sparsemax") and dropout_p == 0:
        alpha = 2.0 if rule.normalizer == "sparsemax" else _per_head(rule.alpha, a)
        return entmax_attention(a, b, v, alpha=alpha, attn_mask=mask, scale=factor)
    one_pair = dataclasses.replace(rule, scores="qk", scale=None, temperature=1.0)
    a = a.to(working_dtype(a)) * factor
    tiles = []
    for rows in query_tiles(a, b.shape[-2]):
        weights = attention_weights(a, b.to(a.dtype), v.to(a.dtype), one_pair, scale=1.0, attn_mask=mask, queries=rows)
        tiles.append(F.dropout(weights, dropout_p, training=dropout_p > 0).to(v.dtype) @ v)
    return torch.cat(tiles, -2)


def _pairs(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> list[tuple[Tensor, Tensor]]:
    projections = {"q": q, "k": k, "v": v}
    return [(projections[a], projections[b]) for a, b in score_pairs(rule.scores)]


def _check_self_correlation(q: Tensor, k: Tensor, rule: AttentionRule) -> None:
    if rule.scores != "qk" and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"score source {rule.scores!r} compares a sequence with itself, but there are {q.shape[-2]} queries and "
            f"{k.shape[-2]} keys; use 'qk' for cross-attention"
        )


def _factor(rule: AttentionRule, a: Tensor, scale: float | None) -> float | Tensor:
    """The host's scale times the rule's, over the temperature: a number, or (heads, 1, 1)."""
    host = (a.shape[-1] ** -0.5 if scale is None else scale) / rule.temperature
    if rule.scale is None:
        return host
    return _per_head(rule.scale, a) * host


def _per_head(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number as it is; a tensor of one element or one per head as (heads, 1, 1) in the working dtype."""
    if not isinstance(value, Tensor):
        return value
    heads = like.shape[-3]
    if value.ndim > 1 or value.numel() not in (1, heads):
        raise ValueError(f"expected one number, or one per head ({heads}), got a tensor of shape {tuple(value.shape)}")
    return value.to(like.device, working_dtype(like)).reshape(-1, 1, 1)


def _divisor(rule: AttentionRule, parts: list[Tensor]) -> int:
    return len(parts) if rule.combine == "mean" else 1
