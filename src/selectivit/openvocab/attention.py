"""Attention of the published methods, where a rule alone does not say it: neighbours, joint scores, GEM's clusters."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from selectivit.openvocab.auto import auto_attention
from selectivit.openvocab.presets import Preset
from selectivit.ops.scores import score_pairs
from selectivit.ops.selective import AttentionRule, selective_attention
from selectivit.swap.last_blocks import Attention


def attention_of(preset: Preset, grid: tuple[int, int], num_prefix: int, layer: int) -> Attention:
    """How a block attends under a preset.

    Args:
        preset: the preset.
        grid: (h, w) in patches.
        num_prefix: how many tokens come before the patches.
        layer: the block's place, for the random mask.

    Returns:
        A function of q, k, v (B, H, N, D), the host's scale and the mask.
    """
    rule = preset.rule(layer)
    near = None if preset.neighbourhood is None else neighbourhood(grid, preset.neighbourhood, num_prefix)
    pairs = score_pairs(preset.scores)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        if near is not None and pairs:
            mask = _added(near.to(q), mask)
        known = {"q": q, "k": k, "v": v}
        sides = [(known[one], known[other]) for one, other in pairs]
        if preset.combine == "scores" and len(pairs) > 1:
            # Side by side, the products of several projections add up: one map of their mean.
            sides = [(torch.cat([a for a, _ in sides], dim=-1), torch.cat([b for _, b in sides], dim=-1))]
            scale = scale / len(pairs)
        if preset.alpha != "auto" and len(sides) == len(pairs):
            return selective_attention(q, k, v, rule, scale=scale, attn_mask=mask)
        one_map = _one_map(preset, num_prefix, replace(rule, scores="qk"))
        outputs = [one_map(a, b, v, scale, mask) for a, b in sides]
        total = torch.stack(outputs).sum(0) if outputs else v
        return total if preset.combine == "sum" or not outputs else total / len(outputs)

    return attend


def _one_map(preset: Preset, num_prefix: int, rule: AttentionRule) -> Attention:
    """Attention of one map: by the rule, or as the image at hand has it."""

    def attend(a: Tensor, b: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        if preset.alpha != "auto":
            return selective_attention(a, b, v, rule, scale=scale, attn_mask=mask)
        return auto_attention(a, b, v, scale=scale / preset.temperature, attn_mask=mask, num_prefix=num_prefix)

    return attend


def neighbourhood(grid: tuple[int, int], sigma: float, num_prefix: int) -> Tensor:
    """What NACLIP adds to the scores: a Gaussian of height 1 around each patch; prefix tokens have no place.

    Args:
        grid: (h, w) in patches.
        sigma: its σ in patches.
        num_prefix: how many tokens come before the patches.

    Returns:
        (N, N) with N = num_prefix + h * w, rows the queries.

    Example:
        >>> neighbourhood((1, 2), 1.0, 1)
        tensor([[0.0000, 0.0000, 0.0000],
                [0.0000, 1.0000, 0.6065],
                [0.0000, 0.6065, 1.0000]])

    Source: NACLIP, arXiv 2404.08181.
    """
    rows, columns = (torch.arange(side, dtype=torch.float32) for side in grid)
    places = torch.cartesian_prod(rows, columns).reshape(-1, 2)  # (h * w, 2)
    squared = (places[:, None] - places).square().sum(-1)
    return F.pad(torch.exp(-squared / (2 * sigma**2)), (num_prefix, 0, num_prefix, 0))


def _added(near: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return near
    return near.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else near + mask


def clustering_attention(preset: Preset, length: Tensor, num_prefix: int, layer: int) -> Attention:
    """GEM's self-self attention: each projection is drawn to its clusters once, and then says where values go.

    Args:
        preset: a preset of two streams.
        length: (B, 1, 1, 1), the tokens' mean norm; times the host's scale it is the factor on cosines.
        num_prefix: how many tokens come before the patches.
        layer: the block's place, for the random mask.

    Returns:
        A function of q, k, v (B, H, N, D), the host's scale and the mask.

    Source: GEM, arXiv 2312.00878.
    """
    one_map = _one_map(preset, num_prefix, replace(preset.rule(layer), scores="qk"))

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        known, factor, outputs = {"q": q, "k": k, "v": v}, (length * scale).to(q), []
        for name, _ in score_pairs(preset.scores):
            x = F.normalize(known[name], dim=-1)
            x = F.normalize(one_map(x * factor, x, x, 1.0, mask), dim=-1)
            outputs.append(one_map(x * factor, x, v, 1.0, mask))
        total = torch.stack(outputs).sum(0)
        return total if preset.combine == "sum" else total / len(outputs)

    return attend
