"""Draw the edges of a segmentation to those of the picture, without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

AT_ONCE = 16  # maps that are refined together
STEPS = tuple((dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if (dy, dx) != (0, 0))


def refine(
    maps: Tensor, picture: Tensor, *, iterations: int = 10, dilations: Sequence[int] = (8, 16), sharpness: float = 10.0
) -> Tensor:
    """Replace each pixel's scores again and again by a mean over neighbours of similar colour.

    The weights are a softmax over the neighbours of minus the colour difference, in units of the colours' spread
    around the pixel: flat and busy regions are treated alike.

    Args:
        maps: (Q, H, W), changed in place.
        picture: (3, H, W) in 0…1.
        iterations: how often.
        dilations: distances in pixels, each with 8 neighbours.
        sharpness: factor on the differences.

    Returns:
        The maps.

    Raises:
        ValueError: maps and picture of different size, or no iterations or dilations.

    Example:
        >>> picture = torch.zeros(3, 4, 4)
        >>> picture[:, :, 2:] = 1
        >>> refine(torch.eye(4)[None], picture, iterations=3, dilations=[1]).shape
        torch.Size([1, 4, 4])

    Source: the idea is PAMR's (Araslanov and Roth 2020, arXiv 2005.08104); the code is ours.
    """
    if maps.shape[-2:] != picture.shape[-2:] or maps.ndim != 3 or picture.shape[0] != 3:
        raise ValueError(f"expected maps (Q, H, W) and a picture (3, H, W), got {maps.shape} and {picture.shape}")
    if iterations < 1 or not dilations or min(dilations) < 1:
        raise ValueError(f"expected iterations and dilations of 1 or more, got {iterations} and {list(dilations)}")
    weights = _similarities(picture.float(), dilations, sharpness).to(maps.dtype)
    for start in range(0, len(maps), AT_ONCE):
        part = maps[start : start + AT_ONCE]
        for _ in range(iterations):
            moved = zip(weights, _neighbours(part, dilations), strict=True)
            new = torch.zeros_like(part)
            for weight, neighbour in moved:
                new.addcmul_(weight, neighbour)
            part = new
        maps[start : start + AT_ONCE] = part
    return maps


def _similarities(picture: Tensor, dilations: Sequence[int], sharpness: float) -> Tensor:
    """Weights of the neighbours, (neighbours, H, W), which sum to 1."""
    around = torch.stack([picture, *_neighbours(picture, dilations)])  # (1 + neighbours, 3, H, W)
    spread = around.std(0)
    difference = (around[1:] - picture).abs()
    return (-sharpness * difference / (spread + 1e-8)).mean(1).softmax(0)


def _neighbours(x: Tensor, dilations: Sequence[int]) -> Iterator[Tensor]:
    """The maps (…, H, W) moved to each neighbour; beyond the edge its own pixels go on."""
    height, width = x.shape[-2:]
    for far in dilations:
        padded = F.pad(x[None], (far, far, far, far), mode="replicate")[0]
        for dy, dx in STEPS:
            top, left = far * (1 + dy), far * (1 + dx)
            yield padded[..., top : top + height, left : left + width]
