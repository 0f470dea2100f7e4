"""Patch features of several photos in the plane: neighbours there are neighbours among the features."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selectivit.vis.core_paths import core_colours
from selectivit.vis.panels import shorten, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

CELLS, CELL = 30, 26
"""Crops of patches stand on a grid of so many cells a side, each so many pixels wide."""


@dataclass(frozen=True)
class PhotoPatches:
    """Some patches of one photo.

    Args:
        name: of the photo.
        photo: (H, W, 3), float in 0..1.
        grid: rows and columns of all its patches.
        places: row and column of each patch, (P, 2), integers.
        points: where each patch lies in the plane, (P, 2).
    """

    name: str
    photo: Tensor
    grid: tuple[int, int]
    places: Tensor
    points: Tensor


def require_umap() -> Any:
    """Import umap-learn, which takes some seconds.

    Returns:
        The module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says on import that TensorFlow is not there
            import umap
    except ModuleNotFoundError as error:
        raise ImportError(f"UMAP needs umap-learn ({error}): pip install 'selectivit[umap]'") from error
    return umap


def umap_points(features: Tensor, *, neighbours: int = 30, min_dist: float = 0.3, seed: int = 0) -> Tensor:
    """Lay features out in the plane by UMAP on their cosine distances; the same seed gives the same points.

    Args:
        features: (P, D).
        neighbours: how many neighbours of a point its surroundings have: few show detail, many the whole.
        min_dist: how near to each other points may come, 0..1.
        seed: of all random numbers.

    Returns:
        (P, 2) float32.

    Raises:
        ImportError: umap-learn is missing.
        ValueError: fewer than 3 features or neighbours that do not fit them, a distance outside 0..1, values that are
            not finite.

    Source: McInnes, Healy and Melville, arXiv 1802.03426.
    """
    if features.ndim != 2 or len(features) < 3:
        raise ValueError(f"expected features (P, D) of at least 3 patches, got {tuple(features.shape)}")
    if not 2 <= neighbours < len(features):
        raise ValueError(f"expected 2 to {len(features) - 1} neighbours for {len(features)} patches, got {neighbours}")
    if not 0 <= min_dist <= 1:
        raise ValueError(f"expected a least distance of 0 to 1, got {min_dist}")
    if not torch.isfinite(features).all():
        raise ValueError("expected finite features, got NaN or infinity: look at the model's output first")
    threads = torch.get_num_threads()
    reducer = require_umap().UMAP(
        n_neighbors=neighbours, min_dist=min_dist, metric="cosine", init="pca", random_state=seed, n_jobs=1
    )
    try:
        return torch.from_numpy(reducer.fit_transform(features.float().cpu().numpy())).float()
    finally:
        torch.set_num_threads(threads)  # Numba sets the count of the OpenMP that it shares with torch


def umap_figure(photos: Sequence[PhotoPatches], *, title: str = "") -> Figure:
    """Draw the points in their photo's colour, beside them what is seen there, and below the photos as the key.

    Args:
        photos: with their patches' points.
        title: above the picture.

    Returns:
        The figure, on no global state.

    Raises:
        ValueError: no photo.

    Example:
        >>> one = PhotoPatches(
        ...     "a.jpg", torch.rand(28, 42, 3), (2, 3), torch.tensor([[0, 0], [1, 2]]), torch.rand(2, 2)
        ... )
        >>> len(umap_figure([one, one]).axes)
        8
    """
    from matplotlib.figure import Figure

    if not photos:
        raise ValueError("expected at least one photo, got none")
    columns = 6
    rows = -(-len(photos) // columns)
    figure = Figure(figsize=(11, 5.9 + 1.75 * rows), dpi=130, layout="constrained")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[5.9, 1.75 * rows])[:, 0]
    left, right = upper.subplots(1, 2)
    colours = core_colours(len(photos))
    _scatter(left, photos, colours)
    _crops(right, photos, colours, (left.get_xlim(), left.get_ylim()))
    left.set_title("each point a patch, in the colour of its photo", fontsize=11)
    right.set_title("what is seen there", fontsize=11)
    for axes in (left, right):
        axes.set(xticks=[], yticks=[])
        axes.set_box_aspect(1)  # the plane's directions have no unit: each fills the panel
    upper.suptitle(shorten(title), fontsize=12, parse_math=False)
    _key(lower, photos, colours, rows, columns)
    return figure


def _scatter(axes: Axes, photos: Sequence[PhotoPatches], colours: Sequence[Any]) -> None:
    points = torch.cat([photo.points for photo in photos])
    owners = torch.cat([torch.full((len(photo.points),), i) for i, photo in enumerate(photos)])
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))  # no photo lies on all others
    shades = torch.tensor(colours)[owners[order]].numpy()
    axes.scatter(*points[order].T.numpy(), c=shades, s=7, linewidths=0, alpha=0.8)
    low, high = points.amin(0), points.amax(0)
    edge = (high - low).clamp_min(1e-6) * 0.03
    (left, bottom), (right, top) = (low - edge).tolist(), (high + edge).tolist()
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _crops(axes: Axes, photos: Sequence[PhotoPatches], colours: Sequence[Any], limits: tuple[Any, Any]) -> None:
    """One image of all crops: in each cell of the plane the patch that lies nearest to its middle."""
    (left, right), (bottom, top) = limits
    canvas = torch.ones(CELLS * CELL, CELLS * CELL, 3)
    nearest: dict[tuple[int, int], tuple[float, int, int]] = {}
    for i, photo in enumerate(photos):
        spans = torch.tensor([right - left, top - bottom])
        scaled = (photo.points - torch.tensor([left, bottom])) / spans * CELLS  # (P, 2), 0..CELLS
        cells = scaled.floor().clamp(0, CELLS - 1)
        distances = (scaled - cells - 0.5).norm(dim=-1).tolist()
        for j, (x, y) in enumerate(cells.int().tolist()):
            nearest[y, x] = min(nearest.get((y, x), (9.0, 0, 0)), (distances[j], i, j))
    for (y, x), (_, i, j) in nearest.items():
        place = canvas[(CELLS - 1 - y) * CELL :, x * CELL :][:CELL, :CELL]
        place[1:-1, 1:-1] = torch.tensor(colours[i])
        place[3:-3, 3:-3] = _crop(photos[i], j, CELL - 6)
    axes.imshow(canvas.numpy(), extent=(left, right, bottom, top), aspect="auto")


def _crop(photo: PhotoPatches, index: int, side: int) -> Tensor:
    """A patch with half a patch around it, (side, side, 3)."""
    height, width = photo.photo.shape[:2]
    row, column = photo.places[index].tolist()
    spans = []
    for place, count, pixels in ((row, photo.grid[0], height), (column, photo.grid[1], width)):
        first, last = (place - 0.5) * pixels / count, (place + 1.5) * pixels / count
        spans.append(slice(max(0, int(first)), max(int(first) + 1, min(pixels, round(last)))))
    seen = photo.photo[spans[0], spans[1]].permute(2, 0, 1)[None]
    return F.interpolate(seen, (side, side), mode="bilinear", antialias=True)[0].permute(1, 2, 0).clamp(0, 1)


def _key(figure: FigureBase, photos: Sequence[PhotoPatches], colours: Sequence[Any], rows: int, columns: int) -> None:
    cells = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes, photo, colour in zip(cells, photos, colours, strict=False):
        show(axes, photo.photo, (photo.photo.shape[0], photo.photo.shape[1]))
        axes.set(xticks=[], yticks=[])
        axes.set_title(shorten(photo.name, 20), fontsize=9, parse_math=False)
        axes.spines[:].set(color=colour, linewidth=4)
    for axes in cells[len(photos) :]:
        axes.axis("off")
