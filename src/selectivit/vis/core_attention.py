"""What chosen cores attend to, layer by layer, and how wide and how object-like that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selectivit.vis.attention import COLOUR_MAP, draw_attention
from selectivit.vis.core_statistics import CoreStatistics
from selectivit.vis.curves import COLOURS
from selectivit.vis.panels import panel_height, photo_panels, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure, FigureBase

MARK = "#D55E00"
"""Where a core is (Okabe and Ito's vermilion)."""


def core_attention_figure(
    photo: Tensor,
    maps: Tensor,
    coords: Tensor,
    cores: Sequence[int],
    layers: Sequence[int],
    statistics: CoreStatistics,
    *,
    title: str = "",
) -> Figure:
    """Draw a row a core, a column a layer, and below them curves over all cores and layers.

    Args:
        photo: (H, W, 3), float in 0..1.
        maps: how much each core takes from each patch, mean over heads, (all layers, C, h, w).
        coords: x and y of every core in every layer, in −1..1, (all layers, C, 2).
        cores: which are drawn.
        layers: which are drawn.
        statistics: of all cores and layers.
        title: above the picture.

    Returns:
        The figure, on no global state.

    Raises:
        ValueError: no core or layer, or one that is not there.

    Example:
        >>> from selectivit.vis.core_statistics import core_statistics
        >>> maps = torch.rand(2, 3, 6)
        >>> found = core_statistics(maps, torch.randn(6, 4), (2, 3))
        >>> figure = core_attention_figure(
        ...     torch.rand(28, 42, 3), maps.reshape(2, 3, 2, 3), torch.zeros(2, 3, 2), [0, 2], [0, 1], found
        ... )
        >>> len(figure.axes)
        8
    """
    from matplotlib.figure import Figure

    for name, chosen, there in (("core", cores, maps.shape[1]), ("layer", layers, maps.shape[0])):
        if not chosen or not all(0 <= i < there for i in chosen):
            raise ValueError(f"expected {name}s of 0 to {there - 1}, got {list(chosen)}")
    width, curves = 1.9, 2.9  # inches
    rows = len(cores) * (panel_height(photo, width) + 0.08) + 1.25
    figure = Figure(figsize=(max(8.0, width * len(layers) + 0.4), rows + curves), dpi=130, layout="constrained")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[rows, curves])[:, 0]
    _draw_maps(upper, photo, maps, coords, cores, layers)
    upper.suptitle(shorten(title), fontsize=12, parse_math=False)
    _draw_curves(lower, statistics, maps[0, 0].numel())
    return figure


def _draw_maps(
    figure: FigureBase, photo: Tensor, maps: Tensor, coords: Tensor, cores: Sequence[int], layers: Sequence[int]
) -> None:
    from matplotlib.cm import ScalarMappable

    cells = photo_panels(figure, len(cores), len(layers))
    shares = maps * maps[0, 0].numel()  # 1 is what each patch gets where a core takes from all alike
    norm = _scale(shares[list(layers)][:, list(cores)])
    height, width = photo.shape[:2]
    for line, core in zip(cells, cores, strict=True):
        for axes, layer in zip(line, layers, strict=True):
            draw_attention(axes, photo, shares[layer, core], norm)
            x, y = ((coords[layer, core] + 1) / 2).tolist()
            axes.plot([x * width], [y * height], "o", color=MARK, markeredgecolor="white", markersize=6)
        line[0].set_ylabel(f"core {core}" + ("\n(the image's)" if core == 0 else ""), fontsize=10)
    for axes, layer in zip(cells[0], layers, strict=True):
        axes.set_title(f"layer {layer}", fontsize=10)
    bar = figure.colorbar(
        ScalarMappable(norm, COLOUR_MAP), ax=cells, orientation="horizontal", fraction=0.03, pad=0.01, aspect=60
    )
    assert norm.vmin and norm.vmax  # _scale sets both
    ticks = torch.logspace(math.log10(norm.vmin), math.log10(norm.vmax), 5, dtype=torch.float64).tolist()
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()
    bar.set_label("weight of a patch over an even share, mean over heads; grey: 0 in every head; dot: core", fontsize=9)
    bar.ax.tick_params(labelsize=9)


def _scale(shares: Tensor) -> LogNorm:
    """One logarithmic scale over what there is, its ends cut, at least from half to double."""
    from matplotlib.colors import LogNorm

    there = shares[shares > 0].double()
    if not len(there):
        there = torch.ones(1, dtype=torch.float64)
    ordered = there.sort().values  # torch.quantile stops at 2^24 values
    low, high = (float(ordered[round(share * (len(ordered) - 1))]) for share in (0.02, 0.998))
    return LogNorm(min(low, 0.5), max(high, 2.0), clip=True)


def _draw_curves(figure: FigureBase, found: CoreStatistics, num_patches: int) -> None:
    left, middle, right = figure.subplots(1, 3)
    _band(left, 100 * found.effective_patches / num_patches, COLOURS[0], "")
    left.set_title(f"width: effective patches, % of {num_patches}", fontsize=10)
    left.set_ylim(0, 105)
    _band(middle, 100 * found.blob_overlap, COLOURS[0], "")
    middle.set_title("% under its own round blob", fontsize=10)
    middle.set_ylim(0, 100)
    _band(right, found.likeness, COLOURS[1], "as the core attends")
    _band(right, found.blob_likeness, COLOURS[0], "as its blob lies")
    right.set_title("likeness of two patches attended to", fontsize=10)
    low, high = right.get_ylim()
    right.set_ylim(min(low, -0.05), max(high, 0.3))  # differences of less are none
    right.legend(fontsize=9, frameon=False, loc="upper left")
    for axes in (left, middle, right):
        axes.set_xlabel("layer (mean over cores; band: 10 to 90 %)", fontsize=9)
        axes.set_xticks(range(0, len(found.likeness), max(1, len(found.likeness) // 6)))
        axes.tick_params(labelsize=9)
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def _band(axes: Axes, values: Tensor, colour: str, label: str) -> None:
    low, high = (values.nanquantile(q, 1).numpy() for q in (0.1, 0.9))  # (layers,); NaN where no core has a value
    axes.fill_between(range(len(values)), low, high, color=colour, alpha=0.15, linewidth=0)
    mean = values.nanmean(1).numpy()
    axes.plot(range(len(values)), mean, color=colour, marker="o", markersize=4, label=label)
