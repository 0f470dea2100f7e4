"""Panels over a photo: a grid of axes of the photo's shape, and pictures laid on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase
    from numpy.typing import NDArray


def panel_height(photo: Tensor, width: float) -> float:
    """How high a panel is drawn; a photo of extreme shape gets a panel that is less so, with margins.

    Args:
        photo: (H, W, 3).
        width: of the panel.

    Returns:
        Its height, in the unit of the width.

    Example:
        >>> panel_height(Tensor(20, 10, 3), 2.0)
        3.6
    """
    return width * min(max(photo.shape[0] / photo.shape[1], 0.4), 1.8)


def photo_panels(figure: FigureBase, rows: int, columns: int) -> NDArray:
    """Axes for pictures: no ticks, no frames.

    Args:
        figure: an empty figure or subfigure.
        rows: of panels.
        columns: of panels.

    Returns:
        The axes, (rows, columns).

    Example:
        >>> from matplotlib.figure import Figure
        >>> photo_panels(Figure(), 2, 3).shape
        (2, 3)
    """
    cells = figure.subplots(rows, columns, squeeze=False)
    for axes in cells.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return cells


def show(axes: Axes, picture: Tensor, size: tuple[int, int]) -> None:
    """Lay a picture on a panel, stretched over the photo's pixels.

    Args:
        axes: the panel.
        picture: (h, w, 3) in 0..1, or grey (h, w).
        size: height and width of the photo in pixels.

    Example:
        >>> from matplotlib.figure import Figure
        >>> panel = Figure().subplots()
        >>> show(panel, Tensor(2, 3, 3).fill_(0.5), (28, 42))
        >>> [float(edge) for edge in panel.get_xlim()]
        [0.0, 42.0]
    """
    height, width = size
    axes.imshow(
        picture.clamp(0, 1).numpy(),
        cmap="gray",
        vmin=0,
        vmax=1,
        extent=(0, width, height, 0),
        interpolation="nearest" if picture.shape[:2] != size else "antialiased",
    )


def shorten(text: str, length: int = 110) -> str:
    """Keep both ends of a text that is wider than the picture.

    Args:
        text: any.
        length: characters that fit.

    Returns:
        The text, its middle left out where it is too long.

    Example:
        >>> shorten("abcdefgh", 4)
        'ab … gh'
    """
    return text if len(text) <= length else f"{text[: length // 2]} … {text[-length // 2 :]}"
