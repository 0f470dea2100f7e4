"""Pictures without axes or margins, a pixel for a pixel of the photo: what a web page lays side by side."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from selectivit.vis.attention import COLOUR_MAP, pale
from selectivit.vis.compare import to_png
from selectivit.vis.core_paths import draw_paths

if TYPE_CHECKING:
    from matplotlib.colors import LogNorm

DOTS_PER_INCH = 100


def picture_png(picture: Tensor) -> bytes:
    """Write a picture as PNG.

    Args:
        picture: (H, W, 3), float in 0..1, or uint8.

    Returns:
        The file's bytes; the same picture gives the same bytes.

    Example:
        >>> picture_png(torch.rand(4, 6, 3))[1:4]
        b'PNG'
    """
    from PIL import Image

    if picture.is_floating_point():
        picture = (picture.clamp(0, 1) * 255).round().to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(picture.contiguous().numpy()).save(buffer, format="PNG", compress_level=3)
    return buffer.getvalue()


def attention_pixels(photo: Tensor, weights: Tensor, norm: LogNorm, *, opacity: float = 0.85) -> Tensor:
    """Lay a heat map over the pale photo, as `draw_attention` does; where a weight is exactly 0 the photo stays grey.

    Args:
        photo: (H, W, 3), float in 0..1.
        weights: attention per patch, (h, w), >= 0.
        norm: the colour scale, see `weight_scale`.
        opacity: of the heat map, 0..1.

    Returns:
        (H, W, 3) float32 in 0..1.

    Example:
        >>> from selectivit.vis.attention import weight_scale
        >>> weights = torch.tensor([[0.0, 0.5]])
        >>> picture = attention_pixels(torch.rand(2, 4, 3), weights, weight_scale(weights))
        >>> bool((picture[:, :2, 0] == picture[:, :2, 1]).all()), bool((picture[:, 2:, 0] == picture[:, 2:, 1]).any())
        (True, False)
    """
    from matplotlib import colormaps

    grey = pale(photo)[..., None].expand(-1, -1, 3).float()
    values = weights.detach().float().cpu()
    colours = colormaps[COLOUR_MAP](norm(values.numpy()))[..., :3]  # (h, w, 3)
    size = (photo.shape[0], photo.shape[1])
    heat = _enlarged(torch.from_numpy(colours).float(), size)
    seen = _enlarged((values > 0).float()[..., None], size)
    return torch.lerp(grey, heat, opacity * seen)


def paths_png(photo: Tensor, coords: Tensor) -> bytes:
    """Draw where cores start and end, and their ways between, over the pale photo and nothing else.

    Args:
        photo: (H, W, 3), float in 0..1.
        coords: x and y in −1..1, (layers, C, 2).

    Returns:
        The bytes of a PNG of the photo's size.

    Example:
        >>> paths_png(torch.rand(28, 42, 3), torch.zeros(3, 4, 2))[1:4]
        b'PNG'
    """
    from matplotlib.figure import Figure

    height, width = photo.shape[:2]
    figure = Figure(figsize=(width / DOTS_PER_INCH, height / DOTS_PER_INCH), dpi=DOTS_PER_INCH)
    axes = figure.add_axes((0, 0, 1, 1))
    draw_paths(axes, photo, coords)
    axes.set_axis_off()
    return to_png(figure)


def _enlarged(grid: Tensor, size: tuple[int, int]) -> Tensor:
    """A grid (h, w, C) at the photo's size (H, W, C), each patch one flat square."""
    return F.interpolate(grid.permute(2, 0, 1)[None], size, mode="nearest")[0].permute(1, 2, 0)
