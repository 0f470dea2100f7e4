"""What a core attends to, in numbers: how wide, how much like a round blob, how alike the patches are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH_VARIANCE = 1 / 12
"""Of a square of side 1: patches are no points, so a core on one patch alone still has a blob."""


@dataclass(frozen=True)
class CoreStatistics:
    """One value a layer and core.

    Args:
        effective_patches: exp(entropy) of the core's attention: the number of patches, weighted equally, with that
            entropy, (layers, C).
        blob_overlap: how much of the attention lies under its own blob, the Gaussian of the same mean and covariance;
            1 is a perfect blob, (layers, C).
        likeness: mean cosine of the final features of two different patches drawn by the attention, the image's mean
            feature taken off: about 0 over the whole image, 1 within one thing, (layers, C).
        blob_likeness: the same for two patches drawn by the blob; likeness above it is what the core picks out beside
            being somewhere, (layers, C).
    """

    effective_patches: Tensor
    blob_overlap: Tensor
    likeness: Tensor
    blob_likeness: Tensor


def core_statistics(maps: Tensor, features: Tensor, grid: tuple[int, int]) -> CoreStatistics:
    """Measure what cores attend to.

    Args:
        maps: how much each core takes from each patch, mean over heads, (layers, C, h * w), >= 0.
        features: of the patches after the last layer, (h * w, D).
        grid: (h, w).

    Returns:
        The statistics, float64. Of a core that takes nothing from patches all are NaN; of one that takes from one patch
        alone, likeness is NaN.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> found = core_statistics(torch.ones(1, 2, 12), torch.randn(12, 8), (3, 4))
        >>> [round(n) for n in found.effective_patches[0].tolist()]
        [12, 12]

    Source: arXiv 2605.12491 describes cores that go from round blobs to objects; these measures are ours.
    """
    h, w = grid
    if maps.ndim != 3 or features.ndim != 2 or not maps.shape[2] == features.shape[0] == h * w:
        raise ValueError(
            f"expected maps (layers, C, N) and features (N, D) of N = {h} x {w} patches, got {tuple(maps.shape)} and "
            f"{tuple(features.shape)}"
        )
    weights = maps.double().cpu()
    weights = weights / weights.sum(-1, keepdim=True)  # (layers, C, N); what a core takes from cores is left out
    blobs = _blobs(weights, grid)
    centred = features.double().cpu() - features.double().cpu().mean(0)
    directions = F.normalize(centred, dim=-1)
    return CoreStatistics(
        torch.special.entr(weights).sum(-1).exp(),
        torch.minimum(weights, blobs).sum(-1),
        _likeness(weights, directions),
        _likeness(blobs, directions),
    )


def _blobs(weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """The Gaussian of each distribution's mean and covariance over the patches, (layers, C, N)."""
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], -1)  # (N, 2)
    mean = weights @ places  # (layers, C, 2)
    away = places - mean[..., None, :]  # (layers, C, N, 2)
    covariance = torch.einsum("lcn,lcni,lcnj->lcij", weights, away, away) + PATCH_VARIANCE * torch.eye(2).double()
    distance = torch.einsum("lcni,lcij,lcnj->lcn", away, torch.linalg.inv(covariance), away)
    return (-0.5 * distance).softmax(-1)


def _likeness(weights: Tensor, directions: Tensor) -> Tensor:
    """Mean cosine of two different patches, both drawn by the weights (layers, C, N)."""
    same = weights.square() @ directions.square().sum(-1)  # pairs of a patch with itself
    apart = 1 - weights.square().sum(-1)
    found = ((weights @ directions).square().sum(-1) - same) / apart
    return torch.where(apart > 1e-9, found, torch.nan)
