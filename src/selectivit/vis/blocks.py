"""Numbers over the blocks of models: a panel a quantity, a line a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selectivit.vis.curves import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Line:
    """One model in one panel.

    Args:
        label: of the model; the same in every panel.
        values: one a block; empty where the model has no such quantity.
        low: lower edge of the band around the line, one a block; empty without a band.
        high: its upper edge.
        level: a constant of the model that is drawn dashed, such as what chance gives.
    """

    label: str
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    level: float | None = None


@dataclass(frozen=True)
class Panel:
    """One quantity.

    Args:
        title: above the panel.
        unit: at its axis.
        lines: one a model, in the order of all panels.
        log: whether the axis is logarithmic.
        missing: what stands in a panel that has nothing to draw.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    log: bool = False
    missing: str = "no model here has it"


def blocks_figure(panels: Sequence[Panel], *, columns: int = 4, title: str = "", note: str = "") -> Figure:
    """Draw panels in a grid under one legend.

    Args:
        panels: at least one, with the same models.
        columns: panels in a row.
        title: of the figure.
        note: a line below.

    Returns:
        The figure, on no global state; `to_png` turns it into a file's bytes.

    Raises:
        ValueError: no panel, or no line in any.

    Example:
        >>> line = Line("softmax", [0.2, 0.5, 0.4], [0.1, 0.4, 0.3], [0.3, 0.6, 0.5], level=0.1)
        >>> figure = blocks_figure([Panel("similarity", "cosine", [line]), Panel("registers", "norm", [])])
        >>> [axes.get_title() for axes in figure.axes]
        ['similarity', 'registers']
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not any(line.values for panel in panels for line in panel.lines):
        raise ValueError("expected at least one panel with at least one line to draw")
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    figure = Figure(figsize=(max(4.3 * columns, 7.0), 3.4 * rows + 0.9), dpi=120, layout=layout)
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    styles = dict(zip(labels, _styles(len(labels)), strict=True))
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    handles: dict[str, Any] = {}
    for axes, panel in zip(cells, panels, strict=False):
        handles |= _draw(axes, panel, styles)
    for axes in cells[len(panels) :]:
        axes.axis("off")
    known = [label for label in labels if label in handles]
    place = {"loc": "outside upper center", "ncols": 3, "frameon": False}
    legend = figure.legend([handles[label] for label in known], known, title=title, fontsize=10, **place)
    legend.get_title().set(fontsize=12, parse_math=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a folder's name may hold $
    if note:
        figure.supxlabel(note, fontsize=9.5, parse_math=False)
    return figure


def _styles(count: int) -> list[dict[str, Any]]:
    """Few models get colours far apart; a row of checkpoints gets shades from the first to the last."""
    if count <= len(COLOURS):
        return [{"color": colour, "marker": marker} for colour, marker in zip(COLOURS, MARKERS, strict=True)][:count]
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    return [{"color": shades(0.92 * i / (count - 1)), "marker": MARKERS[i % len(MARKERS)]} for i in range(count)]


def _draw(axes: Axes, panel: Panel, styles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Draw one panel; gives what the legend shows of each line."""
    axes.set_title(panel.title, fontsize=11)
    drawn = [line for line in panel.lines if line.values]
    if not drawn:
        axes.axis("off")
        axes.text(0.5, 0.5, panel.missing, ha="center", va="center", fontsize=10, color="0.4", wrap=True)
        return {}
    handles = {}
    for line in drawn:
        blocks, style = range(len(line.values)), styles[line.label]
        if line.low and len(drawn) <= len(COLOURS):  # more bands than that hide the lines
            axes.fill_between(blocks, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0)
        handles[line.label] = axes.plot(blocks, line.values, **style, linewidth=2, markersize=4.5)[0]
    for level in dict.fromkeys(line.level for line in drawn if line.level is not None):
        axes.axhline(level, color="0.35", linestyle="--", linewidth=1)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate("chance", (1, level), (-2, 3), **place, ha="right", fontsize=9, color="0.35")
    count = max(len(line.values) for line in drawn)
    if not any(any(line.values) for line in drawn):  # else the axis would go below 0
        axes.set_ylim(0, 1)
    if panel.log:
        axes.set_yscale("log")
    axes.set_ylabel(panel.unit, fontsize=10)
    axes.set_xticks(range(0, count, max(1, count // 12)))
    axes.set_xlabel("block", fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return handles
