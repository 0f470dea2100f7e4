"""Attention as heat maps on the photo, with exact zeros set apart from small values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.image import AxesImage

COLOUR_MAP = "viridis"
"""Legible to the colour-blind, and it holds no grey, which stands for exact zeros."""


def patch_weights(weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """Lay one query's weights on the patch grid, leaving out the prefix tokens.

    Args:
        weights: weights over all keys, (..., L); the patches are the last h * w of them.
        grid: rows and columns of patches, (h, w).

    Returns:
        The weights of the patches, (..., h, w).

    Raises:
        ValueError: fewer keys than patches.

    Example:
        >>> patch_weights(torch.arange(7), (2, 3)).tolist()
        [[1, 2, 3], [4, 5, 6]]
    """
    h, w = grid
    if weights.shape[-1] < h * w:
        raise ValueError(f"expected weights over at least {h} x {w} = {h * w} patches, got {weights.shape[-1]}")
    return weights[..., weights.shape[-1] - h * w :].unflatten(-1, (h, w))


def weight_scale(*weights: Tensor, decades: float = 3.0) -> LogNorm:
    """Choose one logarithmic colour scale for several heat maps.

    Args:
        weights: the heat maps that will share the scale, any shapes, >= 0.
        decades: powers of ten below the largest weight that are told apart; smaller weights take the lowest colour.

    Returns:
        A matplotlib norm from the largest weight down.

    Example:
        >>> weight_scale(torch.tensor([0.0, 0.5])).vmax
        0.5
    """
    from matplotlib.colors import LogNorm

    top = max((w.max().item() for w in weights), default=0.0) or 1.0  # all zero: any scale will do
    return LogNorm(vmin=top / 10**decades, vmax=top, clip=True)


def draw_attention(axes: Axes, photo: Tensor, weights: Tensor, norm: LogNorm, *, opacity: float = 0.85) -> AxesImage:
    """Draw one heat map over the photo; where a weight is exactly 0 the photo shows through, grey and pale.

    Args:
        axes: where to draw.
        photo: (H, W, 3), float in 0..1.
        weights: attention per patch, (h, w), >= 0.
        norm: the colour scale, see `weight_scale`.
        opacity: of the heat map, 0..1.

    Returns:
        The heat map, for a colour bar.

    Example:
        >>> from matplotlib.figure import Figure
        >>> weights = torch.tensor([[0.0, 0.1], [0.2, 0.7]])
        >>> heat = draw_attention(Figure().subplots(), torch.rand(28, 28, 3), weights, weight_scale(weights))
        >>> heat.get_array().mask.tolist()
        [[True, False], [False, False]]
    """
    import numpy as np

    height, width = photo.shape[:2]
    extent = (0, width, height, 0)
    axes.imshow(pale(photo).numpy(), cmap="gray", vmin=0, vmax=1, extent=extent)
    values = weights.detach().float().cpu().numpy()
    heat = axes.imshow(
        np.ma.masked_equal(values, 0.0),
        cmap=COLOUR_MAP,
        norm=norm,
        extent=extent,
        interpolation="nearest",
        alpha=opacity,
    )
    axes.set(xticks=[], yticks=[])
    return heat


def pale(photo: Tensor) -> Tensor:
    """Turn a photo into light greys, so that no part of it looks like a colour of what is drawn over it.

    Args:
        photo: (H, W, 3), float in 0..1.

    Returns:
        (H, W), 0.45..0.95.

    Example:
        >>> pale(torch.zeros(1, 1, 3)).item() > 0.4
        True
    """
    grey = photo @ torch.tensor([0.299, 0.587, 0.114], dtype=photo.dtype)
    return 0.45 + 0.5 * grey
