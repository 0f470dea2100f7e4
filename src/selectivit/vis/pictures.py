"""What the pictures of analyses have in common."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIX_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Six of Okabe and Ito's colours, told apart by the colour-blind too."""


def dress(axes: Axes) -> None:
    """Give axes a pale grid and no frame above and to the right.

    Args:
        axes: to dress.
    """
    axes.tick_params(labelsize=9)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def png(figure: Figure) -> bytes:
    """Render a figure.

    Args:
        figure: to render.

    Returns:
        The bytes of a PNG file.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
