"""Features in PCA colours for every budget of cores and every resolution, one set of colours for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from selectivit.vis.panels import panel_height, photo_panels, shorten, show
from selectivit.vis.pca import pca_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def budget_maps_figure(photo: Tensor, maps: Mapping[tuple[int, int], Tensor], *, title: str = "") -> Figure:
    """Draw a row a resolution, a column a budget, after the photo.

    Args:
        photo: (H, W, 3), float in 0..1.
        maps: (size in pixels of the shorter side, number of cores) -> features (C, h, w); every size has every budget.
        title: above the picture.

    Returns:
        The figure, on no global state.

    Raises:
        ValueError: no maps, a budget that a size lacks, or what `pca_maps` refuses.

    Example:
        >>> maps = {(size, cores): torch.randn(8, 2, 3) for size in (32, 64) for cores in (1, 4)}
        >>> len(budget_maps_figure(torch.rand(28, 42, 3), maps).axes)
        6
    """
    from matplotlib.figure import Figure

    sizes, budgets = sorted({size for size, _ in maps}), sorted({budget for _, budget in maps})
    if not maps or len(maps) != len(sizes) * len(budgets):
        raise ValueError(f"expected features of every budget at every size, got {sorted(maps)}")
    colours, explained = pca_maps(list(maps.values()))
    pictures = dict(zip(maps, colours, strict=True))
    width = 2.2  # inches
    high = len(sizes) * (panel_height(photo, width) + 0.06) + 0.85
    figure = Figure(figsize=(width * (len(budgets) + 1) + 0.75, high), dpi=130, layout="constrained")
    cells = photo_panels(figure, len(sizes), len(budgets) + 1)
    size_of_photo = (photo.shape[0], photo.shape[1])
    for line, size in zip(cells, sizes, strict=True):
        for axes, budget in zip(line[1:], budgets, strict=True):
            show(axes, pictures[size, budget], size_of_photo)
        h, w = maps[size, budgets[0]].shape[1:]
        flat = {"rotation": 0, "ha": "right", "va": "center"} if panel_height(photo, width) < 1.4 else {}
        line[1].set_ylabel(f"{size} px\n{h} × {w} patches", fontsize=10, **flat)
    show(cells[0, 0], photo, size_of_photo)
    cells[0, 0].set_title("photo", fontsize=11)
    for axes in cells[1:, 0]:
        axes.axis("off")
    for axes, budget in zip(cells[0, 1:], budgets, strict=True):
        axes.set_title(f"{budget} core{'s' if budget > 1 else ''}", fontsize=11)
    share = f"features in joint PCA colours: equal colours, equal features ({100 * explained.sum():.0f} % of variance)"
    figure.suptitle("\n".join(filter(None, [shorten(title), share])), fontsize=11, parse_math=False)
    return figure
