"""Which core each patch listens to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selectivit.vis.core_paths import NUMBERED, core_colours
from selectivit.vis.panels import panel_height, photo_panels, shorten, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def listener_shares(winners: Tensor, num_cores: int) -> Tensor:
    """How many patches listen to each core most.

    Args:
        winners: for each patch the core that it takes most from, (..., h, w).
        num_cores: C.

    Returns:
        Shares of the patches, (..., C), float64; they sum to 1.

    Example:
        >>> listener_shares(torch.tensor([[0, 0, 2]]), 3).tolist()
        [0.6666666666666666, 0.0, 0.3333333333333333]
    """
    return torch.stack([(winners == core).double().mean((-2, -1)) for core in range(num_cores)], -1)


def core_listeners_figure(
    photo: Tensor,
    winners: Mapping[int, Tensor],
    coords: Mapping[int, Tensor],
    layers: Sequence[int],
    *,
    title: str = "",
) -> Figure:
    """Draw a row a budget, a column a layer: every patch in the colour of the core that it listens to most.

    Args:
        photo: (H, W, 3), float in 0..1.
        winners: number of cores -> for each patch the core that it takes most from, (all layers, h, w).
        coords: number of cores -> x and y of every core in −1..1, (all layers, C, 2).
        layers: which are drawn.
        title: above the picture.

    Returns:
        The figure, on no global state.

    Raises:
        ValueError: no budget or layer, or a layer that is not there.

    Example:
        >>> winners, coords = {4: torch.randint(4, (2, 2, 3))}, {4: torch.rand(2, 4, 2)}
        >>> len(core_listeners_figure(torch.rand(28, 42, 3), winners, coords, [0, 1]).axes)
        3
    """
    from matplotlib.figure import Figure

    depth = min((len(found) for found in winners.values()), default=0)
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise ValueError(f"expected budgets, and layers of 0 to {depth - 1}, got {list(layers)}")
    width, budgets = 2.2, sorted(winners)
    high = len(budgets) * (panel_height(photo, width) + 0.06) + 0.85
    figure = Figure(figsize=(max(7.5, width * (len(layers) + 1) + 0.55), high), dpi=130, layout="constrained")
    cells = photo_panels(figure, len(budgets), len(layers) + 1)
    size = (photo.shape[0], photo.shape[1])
    show(cells[0, 0], photo, size)
    cells[0, 0].set_title("photo", fontsize=11)
    for axes in cells[1:, 0]:
        axes.axis("off")
    for line, budget in zip(cells, budgets, strict=True):
        for axes, layer in zip(line[1:], layers, strict=True):
            _draw(axes, photo, winners[budget][layer], coords[budget][layer])
        line[1].set_ylabel(f"{budget} cores", fontsize=11)
    for axes, layer in zip(cells[0, 1:], layers, strict=True):
        axes.set_title(f"layer {layer}", fontsize=11)
    key = "a patch has the colour of the core it takes most from; dots: where these cores are"
    figure.suptitle("\n".join(filter(None, [shorten(title, 100), key])), fontsize=11, parse_math=False)
    return figure


def _draw(axes: Axes, photo: Tensor, winners: Tensor, coords: Tensor) -> None:
    colours = torch.tensor(core_colours(len(coords)))
    height, width = photo.shape[:2]
    grey = photo.mean(-1)
    rows, columns = (torch.arange(n) * few // n for n, few in zip((height, width), winners.shape, strict=True))
    shown = colours[winners.cpu()][rows][:, columns].float()  # (H, W, 3)
    show(axes, shown * (0.45 + 0.55 * grey[..., None]), (height, width))
    for core in winners.unique().tolist():
        x, y = ((coords[core] + 1) / 2).tolist()
        place = (x * width, y * height)
        axes.plot(*([p] for p in place), "o", markersize=6, color=colours[core].tolist(), markeredgecolor="white")
        if len(coords) <= NUMBERED:
            inward = {"xytext": (-4 if x > 0.85 else 4, -10 if y < 0.15 else 3), "ha": "right" if x > 0.85 else "left"}
            axes.annotate(str(core), place, textcoords="offset points", fontsize=8, color="white", **inward)
    axes.set(xlim=(0, width), ylim=(height, 0))
