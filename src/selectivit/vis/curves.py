"""Curves over the layers: how many tokens each attention really uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selectivit.vis.statistics import AttentionStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Okabe and Ito's blue, vermilion, green and purple: told apart by the colour-blind too."""

MARKERS = ("o", "s", "^", "D")


def draw_curves(figure: FigureBase, statistics: Mapping[str, Sequence[AttentionStatistics]]) -> None:
    """Draw support share and effective tokens per layer, the mean over heads in a band from the least to the most.

    Args:
        figure: an empty figure or subfigure.
        statistics: name of a variant -> one entry a layer.

    Raises:
        ValueError: no variant, or one without layers.

    Example:
        >>> from matplotlib.figure import Figure
        >>> stats = [AttentionStatistics(9, torch.ones(2), torch.zeros(2), torch.ones(2))] * 3
        >>> figure = Figure()
        >>> draw_curves(figure, {"softmax": stats})
        >>> [axes.get_title() for axes in figure.axes]
        ['support: weights that are not exactly 0', 'effective tokens: exp(entropy)']
    """
    if not statistics or not all(statistics.values()):
        raise ValueError("expected at least one variant with at least one layer to draw")
    left, right = figure.subplots(1, 2)
    for i, (name, layers) in enumerate(statistics.items()):
        style = {"color": COLOURS[i % 4], "marker": MARKERS[i % 4], "label": name}
        _draw_band(left, [100 * layer.support_share for layer in layers], **style)
        _draw_band(right, [layer.effective_tokens for layer in layers], **style)
    left.set_title("support: weights that are not exactly 0", fontsize=11)
    left.set_ylabel("% of all keys", fontsize=10)
    left.set_ylim(0, 105)
    right.set_title("effective tokens: exp(entropy)", fontsize=11)
    right.set_ylabel("tokens a query uses", fontsize=10)
    right.set_yscale("log")
    for axes in (left, right):
        _dress(axes, max(len(layers) for layers in statistics.values()))
    # Above both, since the bands leave no free corner that is the same for every photo.
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=10, frameon=False)


def _draw_band(axes: Axes, values: Sequence[Tensor], *, color: str, marker: str, label: str) -> None:
    heads = torch.stack([v.double() for v in values])  # (layers, H)
    layers = range(len(heads))
    axes.fill_between(layers, heads.amin(1).numpy(), heads.amax(1).numpy(), color=color, alpha=0.18, linewidth=0)
    axes.plot(layers, heads.mean(1).numpy(), color=color, marker=marker, label=label, linewidth=2, markersize=5)


def _dress(axes: Axes, num_layers: int) -> None:
    step = max(1, num_layers // 12)
    axes.set_xticks(range(0, num_layers, step))
    axes.set_xlabel("layer (line: mean over heads; band: least to most)", fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
