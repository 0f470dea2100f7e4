"""One rule of attention: where scores come from and how they become probabilities. Every swap and map uses it."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .attention import as_autocast_would, check_attention_inputs, entmax_attention, without_autocast
from .entmax import check_alpha
from .entmax_autograd import working_dtype
from .normalizers import NORMALIZERS, hashed_noise
from .scores import score_pairs
from .tiles import masked_scores, query_tiles, rows_of, unexpanded

COMBINATIONS = ("mean", "sum")


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionRule:
    """How a layer attends: normalizer and score source, with their numbers.

    Args:
        normalizer: "softmax", "entmax", "sparsemax" or "random_mask".
        alpha: entmax's α ≥ 1; a number or a (heads,) tensor. Sparsemax sets it to 2.
        scores: "qk", "qq", "kk", "vv", a sum such as "qq+kk", or "v" (no mixing).
        scale: factor on the scores on top of the host's own 1/√D; a positive number or a (heads,) tensor; None is 1.
        temperature: > 0; divides the scores.
        combine: of a sum's several attention maps, their "mean" (rows sum to 1) or their "sum".
        seed: of the random mask, which differs between batch elements, heads and score sources.
        layer: which layer this is; the random mask of every layer differs.

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
    layer: int = 0

    def __post_init__(self) -> None:
        if self.normalizer not in NORMALIZERS:
            raise ValueError(f"unknown normalizer {self.normalizer!r}: use one of {', '.join(NORMALIZERS)}")
        if self.normalizer == "sparsemax":
            object.__setattr__(self, "alpha", 2.0)
        for alpha in self.alpha.flatten().tolist() if isinstance(self.alpha, Tensor) else [self.alpha]:
            check_alpha(alpha)
        score_pairs(self.scores)
        if self.combine not in COMBINATIONS:
            raise ValueError(f"combine must be 'mean' or 'sum', got {self.combine!r}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be a positive number, got {self.temperature}")
        given = 1.0 if self.scale is None else self.scale
        scales = given.flatten().tolist() if isinstance(given, Tensor) else [given]
        if not all(0 < scale < math.inf for scale in scales):
            raise ValueError(
                f"scale must be positive and finite: it multiplies the scores before the normalizer, got {self.scale}"
            )
        if not all(
            isinstance(number, numbers.Integral) and -(2**63) <= int(number) < 2**63
            for number in (self.seed, self.layer)
        ):
            raise ValueError(f"seed and layer must be int64 numbers, got seed={self.seed!r}, layer={self.layer!r}")


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
    q, k, v = as_autocast_would(q, k, v)
    check_attention_inputs(q, k, v, attn_mask)
    _check_self_correlation(q, k, rule)
    pairs = _pairs(q, k, v, rule)
    if not pairs:
        return v
    outputs = [
        _attend(a, b, v, rule, pair, _factor(rule, a, scale), attn_mask, dropout_p) for pair, (a, b) in enumerate(pairs)
    ]
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
        >>> attention_weights(q, k, v, SOFTMAX, queries=slice(0, 1)).shape
        torch.Size([1, 2, 1, 5])
    """
    q, k, v = as_autocast_would(q, k, v)
    lead = check_attention_inputs(q, k, v, attn_mask)
    _check_self_correlation(q, k, rule)
    rows = slice(None) if queries is None else queries
    pairs, work = _pairs(q, k, v, rule), working_dtype(q)
    if not pairs:
        n = v.shape[-2]
        return torch.eye(n, dtype=work, device=v.device)[rows].expand(*lead, -1, n)
    maps = [
        _weights(a, b.to(work), rule, pair, _factor(rule, a, scale), attn_mask, rows)
        for pair, (a, b) in enumerate(pairs)
    ]
    return maps[0] if len(maps) == 1 else sum(maps[1:], maps[0]) / _divisor(rule, maps)


def _weights(
    a: Tensor, b: Tensor, rule: AttentionRule, pair: int, factor: float | Tensor, mask: Tensor | None, rows: Any
) -> Tensor:
    """The probabilities of some query rows under one pair of projections; b in the working dtype already."""
    with without_autocast(a):
        scores = masked_scores(a[..., rows, :].to(b.dtype), b, rows_of(unexpanded(mask), rows), factor)
    noise = None
    if rule.normalizer == "random_mask":
        places = torch.arange(a.shape[-2], device=a.device)[rows]
        noise = hashed_noise(scores.shape[:-2], places, b.shape[-2], (rule.seed, rule.layer, pair))
    return NORMALIZERS[rule.normalizer](scores, alpha=_per_head(rule.alpha, scores), noise=noise)


def _attend(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    rule: AttentionRule,
    pair: int,
    factor: float | Tensor,
    mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    if rule.normalizer == "softmax":
        if isinstance(factor, Tensor):  # the fused kernel knows one factor for all heads
            a, factor = (a.to(factor.dtype) * factor).to(a.dtype), 1.0
        if mask is not None:  # torch refuses masks of one dim, and of float64
            mask = mask.to(a.dtype) if mask.dtype == torch.float64 else mask
            mask = mask[None] if mask.ndim == 1 else mask
        return F.scaled_dot_product_attention(a, b, v, attn_mask=mask, dropout_p=dropout_p, scale=factor)
    if rule.normalizer in ("entmax", "sparsemax") and dropout_p == 0:
        return entmax_attention(a, b, v, alpha=_per_head(rule.alpha, a), attn_mask=mask, scale=factor)
    b, tiles = b.to(working_dtype(b)), []
    for rows in query_tiles(a, b.shape[-2]):
        weights = _weights(a, b, rule, pair, factor, mask, rows)
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
