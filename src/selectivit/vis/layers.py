"""A probe's number block by block, a line a model."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence

from selectivit.vis.curves import COLOURS, MARKERS


def layer_picture(
    series: Mapping[str, Sequence[tuple[int, float]]], metric: str, higher: bool, about: str = ""
) -> bytes:
    """Draw a number over the blocks, the best of each line marked and named.

    Args:
        series: name -> (block, number), in the order of blocks.
        metric: what the number is, with its unit.
        higher: whether more is better.
        about: what was measured on what, for the title.

    Returns:
        A PNG.

    Raises:
        ValueError: nothing to draw.

    Example:
        >>> layer_picture({"softmax": [(0, 0.2), (1, 0.5)]}, "mIoU", True)[1:4]
        b'PNG'
    """
    if not series or not all(series.values()):
        raise ValueError("expected at least one line with at least one block to draw")
    from matplotlib.figure import Figure

    figure, buffer = Figure(figsize=(8, 4.8), layout="constrained"), io.BytesIO()
    axes = figure.subplots()
    for i, (name, points) in enumerate(series.items()):
        colour, marker, line = COLOURS[i % 4], MARKERS[i % 4], ("-", "--", ":")[i // 4 % 3]
        blocks, values = [b for b, _ in points], [v for _, v in points]
        axes.plot(blocks, values, color=colour, marker=marker, linestyle=line, linewidth=2, markersize=5, label=name)
        block, value = (max if higher else min)(points, key=lambda point: point[1])
        axes.plot([block], [value], marker="o", markersize=13, fillstyle="none", color=colour)
        axes.annotate(f"{value:#.3g}", (block, value), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    every = sorted({block for points in series.values() for block, _ in points})
    axes.set_xticks(every[:: max(1, len(every) // 24)])
    axes.set_xlabel("block (circle: the best)", fontsize=10)
    axes.set_ylabel(f"{metric}, {'higher' if higher else 'lower'} is better", fontsize=10)
    axes.margins(y=0.12)
    axes.tick_params(labelsize=9)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.suptitle(textwrap.fill(about, 100), fontsize=10)
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
