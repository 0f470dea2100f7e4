"""Core attention: two dense attention calls in place of one under a core–periphery mask."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .attention import as_autocast_would, without_autocast
from .selective import SOFTMAX, AttentionRule, attention_weights, selective_attention

RULES = {"softmax": SOFTMAX, "entmax15": AttentionRule("entmax", alpha=1.5), "sparsemax": AttentionRule("sparsemax")}


def core_attention(
    q: Float[Tensor, "*lead l d"],
    k: Float[Tensor, "*lead l d"],
    v: Float[Tensor, "*lead l e"],
    num_cores: int,
    normalizer: str | float | AttentionRule = "softmax",
    *,
    scale: float | None = None,
) -> Float[Tensor, "*lead l e"]:
    """Attention in which cores attend to every token and patches attend to the cores alone.

    It equals dense attention under the mask `core_mask`, at 2NC + C² products instead of (N + C)².

    Args:
        q: (B, H, L, D), L = C + N tokens, the C cores first; any number of leading dims.
        k: (B, H, L, D).
        v: (B, H, L, E).
        num_cores: C, 1 to L.
        normalizer: "softmax", "entmax15", "sparsemax", a number (entmax's α ≥ 1), or an `AttentionRule` of qk scores.
        scale: factor on q·k; None is 1/√D.

    Returns:
        (B, H, L, E), laid out as (B, L, H, E), so that joining the heads copies nothing.

    Raises:
        ValueError: shapes that do not fit, no core, more cores than tokens, or an unknown normalizer.
        TypeError: dtypes that differ or are not floating.

    Example:
        >>> q = k = v = torch.randn(1, 6, 64 + 196, 64)
        >>> core_attention(q, k, v, num_cores=64).shape
        torch.Size([1, 6, 260, 64])

    Source: VECA, arXiv 2605.12491.
    """
    rule = rule_of(normalizer)
    _check(q, k, v, num_cores)
    q, k, v = as_autocast_would(q, k, v)
    if num_cores == q.shape[-2]:
        return selective_attention(q, k, v, rule, scale=scale)
    attend = selective_attention
    if _small_scores_pay(q, k, v, num_cores, rule):
        attend, k, v = _with_small_scores, k.contiguous(), v.contiguous()  # once: both calls and the backward read them
    # Split, not sliced: the gradient of two slices is two padded tensors and their sum, that of a split one join.
    core_q, patch_q = q.split((num_cores, q.shape[-2] - num_cores), -2)
    cores = attend(core_q, k, v, rule, scale=scale)  # (B, H, C, E)
    few_k, few_v = k[..., :num_cores, :], v[..., :num_cores, :]
    patches = attend(patch_q, few_k, few_v, rule, scale=scale)  # (B, H, N, E)
    if q.ndim < 3:
        return torch.cat([cores, patches], -2)
    # Joined as (B, L, H, E): the fused kernels write that layout already, and the caller's next step wants it.
    return torch.cat([cores.transpose(-3, -2), patches.transpose(-3, -2)], -3).transpose(-3, -2)


def core_weights(
    q: Float[Tensor, "*lead l d"],
    k: Float[Tensor, "*lead l d"],
    num_cores: int,
    normalizer: str | float | AttentionRule = "softmax",
    *,
    scale: float | None = None,
) -> Float[Tensor, "*lead c l"]:
    """The cores' own rows of the attention matrix: who each core listens to.

    Args:
        q: (B, H, L, D), cores first; the C core rows alone will do.
        k: (B, H, L, D).
        num_cores: C.
        normalizer: as for `core_attention`.
        scale: factor on q·k; None is 1/√D.

    Returns:
        (B, H, C, L) float32 (float64 for float64 inputs), each row a distribution over all tokens.

    Example:
        >>> q = k = torch.randn(1, 2, 12, 8)
        >>> core_weights(q, k, num_cores=4).shape
        torch.Size([1, 2, 4, 12])
    """
    return attention_weights(q[..., :num_cores, :], k, k, rule_of(normalizer), scale=scale)


def listening_weights(
    q: Float[Tensor, "*lead l d"],
    k: Float[Tensor, "*lead l d"],
    num_cores: int,
    normalizer: str | float | AttentionRule = "softmax",
    *,
    scale: float | None = None,
) -> Float[Tensor, "*lead n c"]:
    """The patches' rows of the attention matrix: which cores each patch listens to.

    Args:
        q: (B, H, L, D), cores first.
        k: (B, H, L, D); the C core rows alone will do.
        num_cores: C.
        normalizer: as for `core_attention`.
        scale: factor on q·k; None is 1/√D.

    Returns:
        (B, H, N, C) float32 (float64 for float64 inputs), each row a distribution over the cores.

    Example:
        >>> q = k = torch.randn(1, 2, 12, 8)
        >>> listening_weights(q, k, num_cores=4).shape
        torch.Size([1, 2, 8, 4])
    """
    cores = k[..., :num_cores, :]
    return attention_weights(q[..., num_cores:, :], cores, cores, rule_of(normalizer), scale=scale)


def core_mask(num_cores: int, length: int, device: torch.device | str | None = None) -> Tensor:
    """The mask that core attention stands for: True where a token (row) may attend to another (column).

    Args:
        num_cores: C.
        length: L, all tokens.
        device: where the mask is made.

    Returns:
        (L, L) bool.

    Example:
        >>> core_mask(1, 3).int()
        tensor([[1, 1, 1],
                [1, 0, 0],
                [1, 0, 0]], dtype=torch.int32)
    """
    is_core = torch.arange(length, device=device) < num_cores
    return is_core[:, None] | is_core


def rule_of(normalizer: str | float | AttentionRule) -> AttentionRule:
    """The rule of attention that one argument names.

    Args:
        normalizer: "softmax", "entmax15", "sparsemax", entmax's α as a number, or a rule itself.

    Returns:
        A rule whose scores are those of queries and keys.

    Raises:
        ValueError: another name, α below 1, or a rule of other scores than qk.

    Example:
        >>> rule_of(1.2).alpha
        1.2
    """
    if isinstance(normalizer, AttentionRule):
        if normalizer.scores != "qk":
            raise ValueError(
                f"core attention compares queries with keys of other tokens: expected scores 'qk', "
                f"got {normalizer.scores!r}"
            )
        return normalizer
    if isinstance(normalizer, str):
        if normalizer not in RULES:
            raise ValueError(
                f"unknown normalizer {normalizer!r}: use {', '.join(map(repr, RULES))}, or entmax's alpha as a number"
            )
        return RULES[normalizer]
    return SOFTMAX if normalizer == 1 else AttentionRule("entmax", alpha=float(normalizer))


def _small_scores_pay(q: Tensor, k: Tensor, v: Tensor, num_cores: int, rule: AttentionRule) -> bool:
    """Whether scores are written out: torch's fused backward on CPU takes more than twice as long in half precision.

    They and their gradient cost C numbers a token, so only where that is little beside the token itself.
    """
    return (
        (rule.normalizer, rule.scale, rule.temperature) == ("softmax", None, 1.0)
        and q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and num_cores <= 4 * q.shape[-1]
        and torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad)
    )


def _with_small_scores(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, *, scale: float | None = None) -> Tensor:
    """Softmax attention, scores and probabilities in the inputs' dtype; the softmax itself sums in float32."""
    with without_autocast(q):
        scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
        return scores.softmax(-1) @ v


def _check(q: Tensor, k: Tensor, v: Tensor, num_cores: int) -> None:
    if min(q.ndim, k.ndim, v.ndim) < 2 or not q.shape[-2] == k.shape[-2] == v.shape[-2]:
        raise ValueError(
            "core attention expects q, k (B, H, L, D) and v (B, H, L, E) over the same L tokens, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if not 1 <= num_cores <= q.shape[-2]:
        raise ValueError(f"expected 1 to {q.shape[-2]} cores, as many as there are tokens, got num_cores={num_cores}")
