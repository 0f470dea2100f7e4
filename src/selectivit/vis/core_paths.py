"""Where cores are, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selectivit.vis.attention import pale
from selectivit.vis.curves import COLOURS
from selectivit.vis.overlay import palette
from selectivit.vis.panels import panel_height, shorten, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBERED = 16
"""Up to so many cores have their numbers in the picture; more would cover it."""


def core_moves(coords: Tensor) -> Tensor:
    """How far cores are from where they started.

    Args:
        coords: x and y in −1..1, (layers, C, 2).

    Returns:
        Distances as shares of the image's side (1 is from edge to edge), (layers, C); the first layer's are 0.

    Example:
        >>> core_moves(torch.tensor([[[0.0, 0.0]], [[0.6, 0.8]]])).tolist()
        [[0.0], [0.5]]
    """
    return (coords - coords[:1]).norm(dim=-1) / 2


def core_paths_figure(photo: Tensor, coords: Tensor, *, title: str = "") -> Figure:
    """Draw the cores' ways over the photo, and how far they are from their start in each layer.

    Args:
        photo: (H, W, 3), float in 0..1.
        coords: x and y in −1..1, (layers, C, 2).
        title: above the picture.

    Returns:
        The figure, on no global state.

    Raises:
        ValueError: coordinates of another shape.

    Example:
        >>> len(core_paths_figure(torch.rand(28, 42, 3), torch.rand(3, 4, 2)).axes)
        2
    """
    from matplotlib.figure import Figure

    if coords.ndim != 3 or coords.shape[-1] != 2 or 0 in coords.shape:
        raise ValueError(f"expected coordinates (layers, C, 2), got {tuple(coords.shape)}")
    width = 5.2  # inches
    high = max(3.0, panel_height(photo, width))
    figure = Figure(figsize=(width + 4.0, high + 0.9), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[width, 3.6])
    draw_paths(left, photo, coords)
    left.set_title("ring: first layer; dot: last layer; colour: core", fontsize=10)
    moved = 100 * core_moves(coords)
    low, high_, mean = moved.quantile(0.1, 1), moved.quantile(0.9, 1), moved.mean(1)
    layers = range(len(moved))
    right.fill_between(layers, low.numpy(), high_.numpy(), color=COLOURS[0], alpha=0.15, linewidth=0)
    right.plot(layers, mean.numpy(), color=COLOURS[0], marker="o", markersize=4)
    right.set_title("distance from the start, % of the image's side", fontsize=10)
    right.set_xlabel("layer (mean over cores; band: 10 to 90 %)", fontsize=9)
    right.set_xticks(range(0, len(moved), max(1, len(moved) // 6)))
    right.set_ylim(bottom=0)
    right.grid(True, color="0.9", linewidth=0.8)
    right.set_axisbelow(True)
    right.spines[["top", "right"]].set_visible(False)
    figure.suptitle(shorten(title, 90), fontsize=12, parse_math=False)
    return figure


def draw_paths(axes: Axes, photo: Tensor, coords: Tensor) -> None:
    """Draw the cores' ways over a pale photo.

    Args:
        axes: where to draw.
        photo: (H, W, 3), float in 0..1.
        coords: x and y in −1..1, (layers, C, 2).

    Example:
        >>> from matplotlib.figure import Figure
        >>> draw_paths(Figure().subplots(), torch.rand(28, 42, 3), torch.rand(3, 4, 2))
    """
    height, width = photo.shape[:2]
    show(axes, pale(photo), (height, width))
    axes.set(xticks=[], yticks=[])
    places = (coords + 1) / 2 * torch.tensor([width, height], dtype=coords.dtype)  # (layers, C, 2)
    for core, colour in enumerate(core_colours(coords.shape[1])):
        x, y = places[:, core].T.tolist()
        axes.plot(x, y, color="white", linewidth=3.2, solid_capstyle="round")
        axes.plot(x, y, color=colour, linewidth=1.8, solid_capstyle="round")
        axes.plot(x[:1], y[:1], "o", markersize=7, fillstyle="none", color=colour, markeredgewidth=1.4)
        axes.plot(x[-1:], y[-1:], "o", markersize=6, color=colour, markeredgecolor="white", markeredgewidth=0.8)
        if coords.shape[1] <= NUMBERED:
            axes.annotate(str(core), (x[-1], y[-1]), (5, 3), textcoords="offset points", fontsize=9, fontweight="bold")
    axes.set(xlim=(0, width), ylim=(height, 0))


def core_colours(count: int) -> Sequence[tuple[float, float, float]]:
    """A colour for each core, the same in every picture.

    Args:
        count: how many cores.

    Returns:
        Red, green and blue in 0..1 of each.

    Example:
        >>> core_colours(2)[:1] == core_colours(1)
        True
    """
    return [tuple(colour) for colour in (palette(count).double() / 255).tolist()]
