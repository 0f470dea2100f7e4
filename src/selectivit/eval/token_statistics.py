"""How the tokens of a block are: their norms and outliers, and how far the whole photo's meaning has spread in them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from selectivit.features import Features

OUTLIER_FACTOR = 2.0

NO_CLS = "the model has no class token"
NO_REGISTERS = "the model has neither registers nor cores beside the first"


def token_statistics(
    raw: Features, normed: Features, *, outlier_factor: float = OUTLIER_FACTOR
) -> list[dict[str, float | None]]:
    """Measure the tokens of one block, photo by photo.

    Args:
        raw: the tokens as they leave the block.
        normed: the same after the model's final norm, as they are used.
        outlier_factor: a patch is an outlier where its norm is over this many times the median of its photo.

    Returns:
        For each photo:
        `patch_norm`, the median norm of its patches;
        `largest_norm`, the largest over that median;
        `outlier_share`, the share of patches that are outliers, 0..1;
        `cls_norm`, the class token's norm over the patches' median, or None;
        `register_norm`, the mean norm of registers (of VECA's other cores) over that median, or None;
        `cls_similarity`, the mean cosine of the patches and the class token, or None;
        `patch_similarity`, the mean cosine of two different patches.

    Raises:
        ValueError: a factor of 1 or less, or tokens that are not finite.

    Example:
        >>> tokens = torch.ones(1, 4, 8)
        >>> found = Features(tokens.mT.unflatten(2, (2, 2)), tokens, tokens[:, 0], None, None, (2, 2))
        >>> one, = token_statistics(found, found)
        >>> one["outlier_share"], round(one["cls_similarity"], 4), round(one["patch_similarity"], 4)
        (0.0, 1.0, 1.0)

    Source: outliers of norm in Vision Transformers, arXiv 2309.16588; semantic diffusion, arXiv 2605.23868.
    """
    if not outlier_factor > 1:
        raise ValueError(f"expected a factor over 1 for outliers, got {outlier_factor}")
    norms = raw.patch_tokens.double().norm(dim=-1)  # (B, N)
    if not torch.isfinite(norms).all():
        raise ValueError("expected finite tokens, got NaN or infinity: look at the model's output first")
    median = norms.median(1).values
    others = raw.registers
    if others is None and raw.cores is not None and raw.cores.shape[1] > 1:
        others = raw.cores[:, 1:]  # the first one serves as the class token
    columns = {
        "patch_norm": median,
        "largest_norm": norms.amax(1) / median,
        "outlier_share": outliers(norms, outlier_factor).double().mean(1),
        "cls_norm": None if raw.cls is None else raw.cls.double().norm(dim=-1) / median,
        "register_norm": None if others is None else others.double().norm(dim=-1).mean(1) / median,
        "cls_similarity": cls_similarity(normed),
        "patch_similarity": _pairwise(normed.patch_tokens),
    }
    values = {name: None if column is None else column.tolist() for name, column in columns.items()}
    return [{name: None if v is None else v[i] for name, v in values.items()} for i in range(len(median))]


def outliers(norms: Tensor, factor: float = OUTLIER_FACTOR) -> Tensor:
    """Which patches have a norm that stands out.

    Args:
        norms: of the patches of each photo, (..., N).
        factor: over this many times the median of the photo.

    Returns:
        (..., N) bool.

    Example:
        >>> outliers(torch.tensor([1.0, 1.0, 1.1, 5.0])).tolist()
        [False, False, False, True]
    """
    return norms > factor * norms.median(-1, keepdim=True).values


def cls_similarity(normed: Features) -> Tensor | None:
    """The mean cosine of the patches and the class token, (B,) float64; None where there is no class token."""
    if normed.cls is None:
        return None
    whole, patches = normed.cls.double(), normed.patch_tokens.double()
    return torch.cosine_similarity(patches, whole[:, None], dim=-1).mean(1)


def _pairwise(patches: Tensor) -> Tensor | None:
    """The mean cosine over all pairs of different patches (B, N, C), without the N x N matrix; None for one patch."""
    count = patches.shape[1]
    if count < 2:
        return None
    total = F.normalize(patches.double(), dim=-1).sum(1).square().sum(-1)  # every pair twice, and each with itself
    return (total - count) / (count * (count - 1))
