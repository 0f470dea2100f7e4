"""The tokens of one photo as maps: a row a model, a column a view of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from selectivit.vis.attention import COLOUR_MAP
from selectivit.vis.compare import MARK
from selectivit.vis.pca import pca_maps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

HIT, MISS = "#009E73", "#D55E00"
"""Okabe and Ito's green and vermilion; the marks also differ in shape."""


@dataclass(frozen=True)
class TokenMaps:
    """What one model gives on one photo.

    Args:
        label: of the model.
        maps: features of some blocks, name -> (C, h, w).
        norms: of the last block's patches before the final norm, (h, w).
        outliers: (h, w) bool.
        similarity: cosine of the last block's patches and the class token, (h, w); None without one.
    """

    label: str
    maps: dict[str, Tensor]
    norms: Tensor
    outliers: Tensor
    similarity: Tensor | None


def token_figure(photo: Tensor, rows: Sequence[TokenMaps], *, title: str = "") -> Figure:
    """Draw PCA maps of some blocks, norms and the similarity to the class token.

    Each map has a PCA of its own: two models' features have no colours in common.

    Args:
        photo: what the models saw, (H, W, 3), float in 0..1.
        rows: from top to bottom, with maps of equally many blocks.
        title: of the figure.

    Returns:
        The figure, on no global state.

    Raises:
        ValueError: no rows, or rows with maps of unequally many blocks.

    Example:
        >>> row = TokenMaps("a", {"block 0": torch.randn(8, 2, 2)}, torch.ones(2, 2), torch.eye(2).bool(), None)
        >>> len(token_figure(torch.rand(28, 28, 3), [row]).axes) >= 4
        True
    """
    if not rows or len({len(row.maps) for row in rows}) != 1:
        raise ValueError("expected at least one row, all with maps of equally many blocks")
    count = len(rows[0].maps)
    figure, cells = photo_grid(photo, len(rows), count + 3, title=title)
    extent = _extent(photo)
    for line, row in zip(cells, rows, strict=True):
        show_photo(line[0], photo)
        _label(line[0], row.label)
        for axes, (name, features) in zip(line[1:], row.maps.items(), strict=False):
            (colours,), _ = pca_maps([features])
            axes.imshow(colours.numpy(), extent=extent, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.set_title(f"PCA, {name}", fontsize=10)
        heat = line[count + 1].imshow(row.norms.numpy(), extent=extent, cmap=COLOUR_MAP, interpolation="nearest")
        _bar(figure, heat, line[count + 1])
        found = int(row.outliers.sum())
        line[count + 1].set_title(f"norms, {found} outliers", fontsize=10)
        for r, c in row.outliers.nonzero().tolist():
            _frame(line[count + 1], photo, row.outliers.shape, (r, c), MARK)
        if row.similarity is None:
            line[count + 2].axis("off")
            line[count + 2].text(0.5, 0.5, "no class token", ha="center", va="center", color="0.4")
        else:
            draw_scores(figure, line[count + 2], photo, row.similarity)
            line[count + 2].set_title("cosine to CLS", fontsize=10)
    return figure


@dataclass(frozen=True)
class ScoreMaps:
    """Scores of one model's patches on one photo.

    Args:
        label: of the model.
        scores: of some blocks, name -> (h, w).
        hits: for each, whether its best patch lies in a box.
    """

    label: str
    scores: dict[str, Tensor]
    hits: Sequence[bool]


def point_figure(photo: Tensor, boxes: Tensor, rows: Sequence[ScoreMaps], *, title: str = "") -> Figure:
    """Draw the patches' scores block by block with the boxes, and the best patch of each.

    Args:
        photo: the crop that the models saw, (H, W, 3), float in 0..1.
        boxes: (n, 4), left, top, right, bottom in its pixels.
        rows: from top to bottom, with equally many blocks.
        title: of the figure.

    Returns:
        The figure, on no global state.

    Raises:
        ValueError: no rows, or rows with unequally many blocks.

    Example:
        >>> row = ScoreMaps("a", {"block 0": torch.rand(2, 2)}, [True])
        >>> len(point_figure(torch.rand(28, 28, 3), torch.tensor([[0, 0, 14, 14]]), [row]).axes) >= 2
        True
    """
    if not rows or len({len(row.scores) for row in rows}) != 1:
        raise ValueError("expected at least one row, all with equally many blocks")
    figure, cells = photo_grid(photo, len(rows), len(rows[0].scores) + 1, title=title)
    for line, row in zip(cells, rows, strict=True):
        show_photo(line[0], photo)
        _label(line[0], row.label)
        for axes, (name, scores), hit in zip(line[1:], row.scores.items(), row.hits, strict=True):
            draw_scores(figure, axes, photo, scores)
            axes.set_title(f"{name}: {'in the box' if hit else 'outside'}", fontsize=10, color=HIT if hit else MISS)
            best = divmod(int(scores.flatten().argmax()), scores.shape[1])
            high, wide = photo.shape[0] / scores.shape[0], photo.shape[1] / scores.shape[1]
            place = ([(best[1] + 0.5) * wide], [(best[0] + 0.5) * high])
            axes.plot(
                *place, marker="o" if hit else "X", markersize=9, color=HIT if hit else MISS, mec="white", mew=1.5
            )
        for axes in line:
            for left, top, right, bottom in boxes.tolist():
                _rectangle(axes, left, top, right - left, bottom - top, "white", 3.0)
                _rectangle(axes, left, top, right - left, bottom - top, "black", 1.2)
    return figure


def photo_grid(photo: Tensor, rows: int, columns: int, *, title: str = "") -> tuple[Figure, list[list[Axes]]]:
    """A grid of axes in the photo's shape.

    Args:
        photo: (H, W, 3).
        rows: of the grid.
        columns: of the grid.
        title: of the figure.

    Returns:
        The figure and its axes by row and column.
    """
    from matplotlib.figure import Figure

    side = 2.3  # inches of a column
    high = side * min(max(photo.shape[0] / photo.shape[1], 0.5), 1.8)
    figure = Figure(figsize=(side * columns + 0.4, (high + 0.65) * rows + 0.4), dpi=110, layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False)
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)  # a file's name may hold $
    return figure, [list(line) for line in cells]


def show_photo(axes: Axes, photo: Tensor) -> None:
    """Draw the photo (H, W, 3), float in 0..1."""
    axes.imshow(photo.clamp(0, 1).numpy(), extent=_extent(photo))
    axes.set(xticks=[], yticks=[])


def draw_scores(figure: Figure, axes: Axes, photo: Tensor, scores: Tensor) -> None:
    """Draw scores (h, w) over the photo in grey, from the least to the most, with a colour bar."""
    grey = photo @ photo.new_tensor([0.299, 0.587, 0.114])
    axes.imshow(grey.numpy(), cmap="gray", vmin=0, vmax=1, extent=_extent(photo))
    heat = axes.imshow(scores.numpy(), extent=_extent(photo), cmap=COLOUR_MAP, alpha=0.7, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    _bar(figure, heat, axes)


def _bar(figure: Figure, heat: ScalarMappable, axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    bar = axes.inset_axes((0.06, -0.1, 0.88, 0.04))  # beside the axes, so that all of them keep one size
    figure.colorbar(heat, cax=bar, orientation="horizontal")
    bar.tick_params(labelsize=7)
    bar.locator_params(nbins=3)


def _label(axes: Axes, text: str) -> None:
    name, _, attention = text.partition(", ")
    lines = [part if len(part) < 32 else f"{part[:15]}…{part[-15:]}" for part in (name, attention) if part]
    axes.set_ylabel("\n".join(lines), fontsize=9, parse_math=False)


def _extent(photo: Tensor) -> tuple[float, float, float, float]:
    return (0, photo.shape[1], photo.shape[0], 0)


def _frame(axes: Axes, photo: Tensor, grid: Sequence[int], patch: tuple[int, int], colour: str) -> None:
    high, wide = photo.shape[0] / grid[0], photo.shape[1] / grid[1]
    _rectangle(axes, patch[1] * wide, patch[0] * high, wide, high, colour, 1.2)


def _rectangle(axes: Axes, left: float, top: float, wide: float, high: float, colour: str, line: float) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=colour, linewidth=line))
