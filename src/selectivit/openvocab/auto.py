"""`alpha="auto"`: α and the scale of the scores, per layer and head, from the row statistics of the image at hand.

What is matched is a number of keys. Each row of scores says itself how many keys stand out: those in the upper of the
two groups that two-means makes of it. A head whose softmax effectively uses no more keys than that keeps softmax; of a
more diffuse one, α and then the scale are raised until entmax uses as many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selectivit.ops.entmax import entmax
from selectivit.ops.selective import AttentionRule, selective_attention
from selectivit.ops.tiles import masked_scores, rows_of

ROWS = 64  # queries that are looked at
HALVINGS = 10
SPLITS = 8  # rounds of two-means
MAX_LOG_SCALE = 4.0


Note = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def effective_tokens(weights: Tensor) -> Tensor:
    """How many keys the queries effectively use: exp(entropy), the mean over queries.

    Args:
        weights: (…, N, M), rows sum to 1.

    Returns:
        (…).

    Example:
        >>> effective_tokens(torch.full((1, 3, 8), 1 / 8))
        tensor([8.0000])
    """
    return torch.special.entr(weights).sum(-1).exp().mean(-1)


def keys_that_stand_out(scores: Tensor) -> Tensor:
    """How many keys of a row are in the upper of two groups (two-means of its scores), the mean over rows.

    Args:
        scores: (…, N, M); hidden keys −inf.

    Returns:
        (…), 1 or more.

    Example:
        >>> keys_that_stand_out(torch.tensor([[5.0, 4.0, 0.0, 1.0, 0.5]]))
        tensor(2.)
    """
    shown = scores > -torch.inf
    scores = scores.masked_fill(~shown, 0.0)

    def mean(group: Tensor) -> Tensor:
        return (scores * group).sum(-1, keepdim=True) / group.sum(-1, keepdim=True).clamp_min(1)

    middle = mean(shown)
    for _ in range(SPLITS):
        upper = shown & (scores > middle)
        middle = (mean(upper) + mean(shown & ~upper)) / 2
    return (shown & (scores > middle)).sum(-1).float().mean(-1).clamp_min(1.0)


def choose(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Choose α and a factor on the scores for each head, by how many keys softmax effectively uses.

    A head whose softmax uses no more than the target keeps softmax. Of another, α is raised from 1 until entmax uses as
    many keys as the target says; where 2 does not suffice, the scores are scaled up too.

    Args:
        scores: (H, N, M), with the host's scale, of some queries.
        target: (H,), keys that a query shall effectively use.

    Returns:
        α and factor, (H,) each.

    Example:
        >>> diffuse, sharp = torch.randn(1, 50, 50), 100 * torch.randn(1, 50, 50)
        >>> alpha, factor = choose(torch.cat([diffuse, sharp]), torch.tensor([10.0, 10.0]))
        >>> bool(alpha[0] > 1), alpha[1].item(), factor[1].item()
        (True, 1.0, 1.0)
    """
    diffuse = effective_tokens(scores.softmax(-1)) > target
    alpha = _largest(lambda alpha: effective_tokens(entmax(scores, alpha)) > target, diffuse, 1.0, 2.0)
    log = _largest(lambda log: effective_tokens(entmax(scores * log.exp(), 2.0)) > target, diffuse, 0.0, MAX_LOG_SCALE)
    alpha = torch.where(diffuse, alpha, 1.0)
    return alpha, torch.where(alpha > 2 - 2**-HALVINGS, log.exp(), 1.0)


def _largest(too_diffuse: Callable[[Tensor], Tensor], like: Tensor, low: float, high: float) -> Tensor:
    """Per head (H,), the number up to which its rows are too diffuse, by halving; `high` where they are throughout."""
    lower = torch.full(like.shape, low, device=like.device)
    upper = torch.full(like.shape, high, device=like.device)
    for _ in range(HALVINGS):
        middle = (lower + upper) / 2
        still = too_diffuse(middle[:, None, None])
        lower, upper = torch.where(still, middle, lower), torch.where(still, upper, middle)
    return upper


def auto_attention(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    *,
    scale: float,
    attn_mask: Tensor | None,
    num_prefix: int,
    note: Note | None = None,
) -> Tensor:
    """Attend with α and scale chosen for each image and head.

    Args:
        a: (B, H, N, D), what asks.
        b: (B, H, N, D), what is asked.
        v: (B, H, N, D), what is gathered.
        scale: the host's factor on the products.
        attn_mask: additive or boolean, broadcast to (B, H, N, N).
        num_prefix: how many tokens come before the patches; their rows are not looked at.
        note: called for each image with α, factor, the effective tokens before and after, and the target, (H,) each.

    Returns:
        (B, H, N, D).
    """
    count = min(ROWS, a.shape[-2] - num_prefix)
    rows = torch.linspace(num_prefix, a.shape[-2] - 1, count, device=a.device).round().long()
    outputs = []
    for i in range(len(a)):
        one, mask = slice(i, i + 1), _of_image(attn_mask, i)
        with torch.no_grad():
            scores = masked_scores(a[one][..., rows, :].float(), b[one].float(), rows_of(mask, rows), scale)[0]
            target = keys_that_stand_out(scores)  # of scores (H, R, N)
            alpha, factor = choose(scores, target)
            if note is not None:
                before = effective_tokens(scores.softmax(-1))
                after = effective_tokens(entmax(scores * factor[:, None, None], alpha[:, None, None]))
                note(alpha, factor, before, after, target)
        rule = AttentionRule("entmax", alpha=alpha, scale=factor)
        outputs.append(selective_attention(a[one], b[one], v[one], rule, scale=scale, attn_mask=mask))
    return torch.cat(outputs)


def _of_image(mask: Tensor | None, image: int) -> Tensor | None:
    if mask is None or mask.ndim < 4 or len(mask) == 1:
        return mask
    return mask[image : image + 1]
