"""From scores to probabilities: the normalizers, and the two controls that tell denoising from mere sparsity.

A temperature below 1 sharpens softmax without zeros; the random mask has entmax's support size in every row but picks
its members blindly. Neither gains what entmax gains (arXiv 2607.07135), so the content of the support matters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .entmax import entmax

# splitmix64's constants, as the signed integers that torch's int64 arithmetic wraps around to the same bits
GOLDEN, FIRST, SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def softmax(scores: Tensor, *, alpha: float | Tensor = 1.0, noise: Tensor | None = None) -> Tensor:
    """Softmax over the last dim; a row that is masked throughout gives zeros. Alpha and noise play no part."""
    if scores.shape[-1] == 0:
        return scores
    hidden = scores.amax(-1, keepdim=True) == -math.inf
    return scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)


def sparse(scores: Tensor, *, alpha: float | Tensor = 1.5, noise: Tensor | None = None) -> Tensor:
    """α-entmax over the last dim; sparsemax is the one with α = 2."""
    return entmax(scores, alpha)


def random_mask(scores: Tensor, *, alpha: float | Tensor = 1.5, noise: Tensor | None = None) -> Tensor:
    """Softmax over a random subset of each row, of the size of α-entmax's support.

    Args:
        scores: (…, M).
        alpha: the entmax whose support size is matched.
        noise: of the scores' shape, no number below 0 and none twice in a row; those with the largest are kept.

    Returns:
        (…, M).
    """
    if noise is None:
        raise ValueError("random_mask needs noise, one number per score: hashed_noise makes it")
    if scores.shape[-1] == 0:
        return scores
    size = (entmax(scores.detach(), alpha) != 0).sum(-1, keepdim=True)  # a NaN counts, so that its row stays NaN
    noise = torch.where(scores == -math.inf, -1, noise)
    least = noise.sort(dim=-1, descending=True).values.gather(-1, (size - 1).clamp_min(0))
    return softmax(scores.masked_fill((noise < least) | (size == 0), -math.inf))


NORMALIZERS = {"softmax": softmax, "entmax": sparse, "sparsemax": sparse, "random_mask": random_mask}


def hashed_noise(lead: tuple[int, ...], rows: Tensor, columns: int, key: tuple[int, ...]) -> Tensor:
    """Random integers for `random_mask`: each a hash of the key and its own place, so that any part may be had alone.

    Args:
        lead: the leading (batch, head) dims.
        rows: (R,) int64, the rows' places in the whole matrix.
        columns: M.
        key: int64 numbers, such as seed and layer; noise of different keys is independent.

    Returns:
        (*lead, R, M) int64 on the rows' device, ≥ 0, all different within a row.
    """
    starts = torch.arange(math.prod(lead), device=rows.device).view(*lead, 1, 1)
    for part in (*map(int, key), rows.unsqueeze(-1)):
        starts = _splitmix(starts ^ part)  # in the end (*lead, R, 1)
    column = torch.arange(columns, device=rows.device)
    bits = max(1, (columns - 1).bit_length())
    return _splitmix(starts + column * GOLDEN).bitwise_and_((2**63 - 1) >> bits << bits).bitwise_or_(column)


def _splitmix(x: Tensor) -> Tensor:
    """splitmix64's mix of 64 bits (Steele, Lea, Flood 2014), elementwise, on int64."""
    x = x + GOLDEN
    for shift, factor in ((30, FIRST), (27, SECOND)):
        x = x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """The unsigned x >> bits; torch's own copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
