"""One figure of one photo: the same model with different attention, side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from selectivit.vis.attention import COLOUR_MAP, draw_attention, weight_scale
from selectivit.vis.curves import draw_curves
from selectivit.vis.panels import shorten
from selectivit.vis.pca import pca_maps
from selectivit.vis.statistics import AttentionStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Grid = tuple[int, int]
"""Rows and columns, or a row and a column."""

MARK = "#D55E00"
"""The colour of the marked patch (Okabe and Ito's vermilion)."""


@dataclass(frozen=True)
class Variant:
    """One way of attending, and what it gave on the photo.

    Args:
        title: the row's name, such as "softmax".
        map: features of the patches, (C, h, w).
        cls_attention: what the CLS token attends to, per patch, (h, w).
        patch_attention: what the chosen patch attends to, (h, w).
        statistics: one entry a layer.
    """

    title: str
    map: Tensor
    cls_attention: Tensor
    patch_attention: Tensor
    statistics: Sequence[AttentionStatistics]


def compare_figure(
    photo: Tensor,
    variants: Sequence[Variant],
    patch: tuple[int, int],
    *,
    title: str = "",
    note: str = "",
    cls_title: str = "attention of CLS",
) -> Figure:
    """Draw a row per variant (photo, joint PCA, CLS attention, a patch's attention), and curves over the layers.

    Args:
        photo: what the model saw, (H, W, 3), float in 0..1.
        variants: the rows, from top to bottom.
        patch: row and column of the patch whose attention is shown, counted from the upper left.
        title: the figure's title.
        note: a few short lines below the photos, such as the settings.
        cls_title: the title of the third column, for models without a CLS token.

    Returns:
        The figure, on no global state; `to_png` turns it into a file's bytes.

    Raises:
        ValueError: no variant, or the patch lies outside the grid.

    Example:
        >>> stats = [AttentionStatistics(5, torch.ones(2), torch.zeros(2), torch.ones(2))]
        >>> row = Variant("softmax", torch.randn(8, 2, 2), torch.rand(2, 2), torch.rand(2, 2), stats)
        >>> len(compare_figure(torch.rand(28, 28, 3), [row], (0, 1)).axes) > 4
        True
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    grid = _check(variants, patch)
    column, curves = 3.1, 3.2  # inches
    row = column * min(max(photo.shape[0] / photo.shape[1], 0.5), 1.8)
    rows = len(variants) * (row + 0.05) + 1.3
    figure = Figure(figsize=(4 * column, rows + curves), dpi=130, layout=ConstrainedLayoutEngine(h_pad=0.08))
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[rows, curves])[:, 0]
    # The colour bars have a row of their own: taken from the columns they colour, they would shift these.
    cells = upper.subplots(len(variants) + 1, 4, squeeze=False, height_ratios=[row] * len(variants) + [0.1])
    _draw_rows(cells, photo, variants, grid, patch)
    cells[0, 2].set_title(cls_title, fontsize=11)
    for blank in cells[-1, :2]:
        blank.axis("off")
    text = cells[-1, 0].text(0, 1, note, fontsize=9.5, va="top", linespacing=1.4, transform=cells[-1, 0].transAxes)
    text.set_in_layout(False)  # it may reach under the second column
    draw_curves(lower, {v.title: v.statistics for v in variants})
    if title:
        upper.suptitle(shorten(title), fontsize=13, parse_math=False)  # a file's name may hold $
    return figure


def to_png(figure: Figure) -> bytes:
    """Render a figure with the Agg canvas.

    Args:
        figure: any matplotlib figure.

    Returns:
        The bytes of a PNG file; the same figure gives the same bytes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> to_png(Figure(figsize=(1, 1)))[1:4]
        b'PNG'
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": "selectivit"})
    return buffer.getvalue()


def _check(variants: Sequence[Variant], patch: Grid) -> Grid:
    if not variants:
        raise ValueError("expected at least one variant to draw, got none")
    h, w = variants[0].map.shape[1:]
    if not (0 <= patch[0] < h and 0 <= patch[1] < w):
        raise ValueError(f"expected a patch within {h} rows and {w} columns, counted from 0, got {patch}")
    return h, w


def _draw_rows(cells: NDArray, photo: Tensor, variants: Sequence[Variant], grid: Grid, patch: Grid) -> None:
    """Fill a grid of axes: a row per variant, and the colour bars of the last two columns in the row below."""
    from matplotlib.cm import ScalarMappable

    height, width = photo.shape[:2]
    colours, explained = pca_maps([v.map for v in variants])
    cls_norm = weight_scale(*(v.cls_attention for v in variants))
    patch_norm = weight_scale(*(v.patch_attention for v in variants))
    for line, variant, colour in zip(cells, variants, colours, strict=False):
        line[0].imshow(photo.clamp(0, 1).numpy(), extent=(0, width, height, 0))
        line[0].set_ylabel(variant.title, fontsize=12, fontweight="bold")
        line[1].imshow(colour.numpy(), extent=(0, width, height, 0), interpolation="nearest")
        draw_attention(line[2], photo, variant.cls_attention, cls_norm)
        draw_attention(line[3], photo, variant.patch_attention, patch_norm)
        for axes in line:
            axes.set(xticks=[], yticks=[])
        for axes in (line[0], line[3]):
            _mark(axes, photo, grid, patch)
    for cell, norm in zip(cells[-1, 2:], (cls_norm, patch_norm), strict=True):
        cell.axis("off")
        bar = cell.inset_axes((0.07, 0, 0.86, 1))  # room for the numbers at its ends, or they would shift the column
        bar.figure.colorbar(ScalarMappable(norm, COLOUR_MAP), cax=bar, orientation="horizontal")
        bar.set_xlabel("mean over heads (grey: 0 in every head)", fontsize=9)
        bar.tick_params(labelsize=9)
    cells[0, 0].set_title("photo, query patch marked", fontsize=11)
    cells[0, 1].set_title(f"features, joint PCA ({100 * explained.sum().item():.0f} % of variance)", fontsize=11)
    cells[0, 3].set_title("attention of the marked patch", fontsize=11)


def _mark(axes: Axes, photo: Tensor, grid: Grid, patch: Grid) -> None:
    """Frame one patch: a white line under a coloured one, to be seen on any ground."""
    from matplotlib.patches import Rectangle

    high, wide = photo.shape[0] / grid[0], photo.shape[1] / grid[1]
    corner = (patch[1] * wide, patch[0] * high)
    for colour, line in (("white", 3.5), (MARK, 1.8)):
        axes.add_patch(Rectangle(corner, wide, high, fill=False, edgecolor=colour, linewidth=line))
