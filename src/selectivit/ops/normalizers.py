"""From scores to probabilities: the normalizers, and the two controls that tell denoising from mere sparsity.

A temperature below 1 sharpens softmax without zeros; the random mask has entmax's support size in every row but picks
its members blindly. Neither gains what entmax gains (arXiv 2607.07135), so the content of the support matters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .entmax import entmax, working_dtype


def softmax(scores: Tensor, *, alpha: float | Tensor = 1.0, noise: Tensor | None = None) -> Tensor:
    """Softmax over the last dim; a row that is masked throughout gives zeros. Alpha and noise play no part."""
    return entmax(scores, 1.0)


def sparse(scores: Tensor, *, alpha: float | Tensor = 1.5, noise: Tensor | None = None) -> Tensor:
    """α-entmax over the last dim."""
    return entmax(scores, alpha)


def sparsemax(scores: Tensor, *, alpha: float | Tensor = 2.0, noise: Tensor | None = None) -> Tensor:
    """Sparsemax over the last dim: entmax with α = 2, whatever alpha says."""
    return entmax(scores, 2.0)


def random_mask(scores: Tensor, *, alpha: float | Tensor = 1.5, noise: Tensor | None = None) -> Tensor:
    """Softmax over a random subset of each row, of the size of α-entmax's support.

    Args:
        scores: (…, M).
        alpha: the entmax whose support size is matched.
        noise: uniform numbers that broadcast to the scores' shape; those with the largest are kept.

    Returns:
        (…, M).
    """
    if noise is None:
        raise ValueError("random_mask needs noise: uniform numbers that broadcast to the scores' shape")
    size = (entmax(scores, alpha) > 0).sum(-1, keepdim=True)
    ranked = torch.where(scores == -math.inf, -1.0, noise).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(ranked)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ranked, places < size)
    return softmax(scores.masked_fill(~kept, -math.inf))


NORMALIZERS = {"softmax": softmax, "entmax": sparse, "sparsemax": sparsemax, "random_mask": random_mask}


def seeded_noise(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """Uniform numbers for `random_mask`, the same on every device for one seed and shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=working_dtype(like)).to(like.device)
