"""Pictures of analyses: bars, lines over sizes, a grid of numbers, gain against diffuseness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from selectivit.vis.curves import MARKERS
from selectivit.vis.pictures import SIX_COLOURS, dress, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]


def _figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure


def _percent(value: float | None) -> float:
    return float("nan") if value is None else 100 * value


def bars_picture(rows: Rows, groups: Sequence[str], series: str, title: str = "") -> bytes:
    """Draw mIoU as bars, side by side within a group.

    Args:
        rows: each with "miou" (0..1 or None).
        groups: the columns whose values make a group.
        series: the column whose values stand side by side.
        title: of the figure.

    Returns:
        A PNG.

    Example:
        >>> rows = [{"scores": "qk", "attention": name, "miou": 0.2} for name in ("softmax", "entmax")]
        >>> bars_picture(rows, ["scores"], "attention")[1:4]
        b'PNG'
    """
    names = list(dict.fromkeys("\n".join(str(row[column]) for column in groups) for row in rows))
    labels = list(dict.fromkeys(row[series] for row in rows))
    figure = _figure(max(5, 0.55 * len(names) * len(labels) + 2), 4, title)
    axes, width = figure.subplots(), 0.8 / len(labels)
    for i, label in enumerate(labels):
        some = [row for row in rows if row[series] == label]
        places = [names.index("\n".join(str(row[column]) for column in groups)) for row in some]
        at = [place + (i - (len(labels) - 1) / 2) * width for place in places]
        bars = axes.bar(at, [_percent(row["miou"]) for row in some], width, label=label, color=SIX_COLOURS[i % 6])
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.set_ylabel("mIoU (%)", fontsize=10)
    dress(axes)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return png(figure)


def lines_picture(rows: Rows, title: str = "") -> bytes:
    """Draw mIoU over the photos' size, a colour a source, softmax dashed.

    Args:
        rows: each with "size", "scores", "normalizer" and "miou".
        title: of the figure.

    Returns:
        A PNG.

    Example:
        >>> lines_picture([{"size": 224, "scores": "qk", "normalizer": "softmax", "miou": 0.2}])[1:4]
        b'PNG'
    """
    figure = _figure(6, 4.2, title)
    axes = figure.subplots()
    sources = list(dict.fromkeys(row["scores"] for row in rows))
    for source in sources:
        for normalizer, style in (("softmax", "--"), ("entmax", "-")):
            some = sorted((r for r in rows if (r["scores"], r["normalizer"]) == (source, normalizer)), key=_size)
            values, colour = [_percent(row["miou"]) for row in some], SIX_COLOURS[sources.index(source) % 6]
            sizes, label = [row["size"] for row in some], f"{source} {normalizer}"
            axes.plot(sizes, values, color=colour, linestyle=style, marker="o", label=label, linewidth=2)
    axes.set_xticks(sorted({row["size"] for row in rows}))
    axes.set_xlabel("shorter side (px)", fontsize=10)
    axes.set_ylabel("mIoU (%)", fontsize=10)
    dress(axes)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False, handlelength=4)
    return png(figure)


def _size(row: Mapping[str, Any]) -> int:
    return row["size"]


def grid_picture(rows: Rows, title: str = "") -> bytes:
    """Draw mIoU as a grid of numbers, alphas across and layers down.

    Args:
        rows: each with "layers", "alpha" and "miou".
        title: of the figure.

    Returns:
        A PNG.

    Example:
        >>> grid_picture([{"layers": 1, "alpha": alpha, "miou": alpha / 10} for alpha in (1, 1.5)])[1:4]
        b'PNG'
    """
    depths, alphas = (list(dict.fromkeys(row[name] for row in rows)) for name in ("layers", "alpha"))
    values = [[float("nan")] * len(alphas) for _ in depths]
    for row in rows:
        values[depths.index(row["layers"])][alphas.index(row["alpha"])] = _percent(row["miou"])
    figure = _figure(max(5, len(alphas) + 2.5), max(3, 0.7 * len(depths) + 1.6), title)
    axes = figure.subplots()
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    known = [value for line in values for value in line if value == value] or [0.0]
    middle = min(known) + 0.6 * (max(known) - min(known))
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            colour = "black" if value > middle else "white"
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(alphas)), ["softmax" if alpha == 1 else f"{alpha:g}" for alpha in alphas])
    axes.set_yticks(range(len(depths)), [f"last {depth}" for depth in depths])
    axes.set_xlabel("alpha", fontsize=10)
    figure.colorbar(image, label="mIoU (%)")
    return png(figure)


def scatter_picture(points: Rows, correlation: Mapping[str, float | None], title: str = "") -> bytes:
    """Draw the gain against each measure of diffuseness, a point a source, a mark a model.

    Args:
        points: each with "model", "scores", "gain" and the measures.
        correlation: by measure; None where there is none.
        title: of the figure.

    Returns:
        A PNG.

    Example:
        >>> points = [{"model": "a", "scores": "qk", "gain": 0.1, "other_classes": 0.4}]
        >>> scatter_picture(points, {"other_classes": None})[1:4]
        b'PNG'
    """
    figure = _figure(5 * len(correlation), 4.2, title)
    models = list(dict.fromkeys(point["model"] for point in points))
    known = [point for point in points if point["gain"] is not None]
    for axes, (name, r) in zip(
        figure.subplots(1, len(correlation), squeeze=False)[0], correlation.items(), strict=True
    ):
        factor = 1 if name == "effective_tokens" else 100
        for i, model in enumerate(models):
            some = [point for point in known if point["model"] == model]
            at, gain = [factor * point[name] for point in some], [_percent(point["gain"]) for point in some]
            mark, colour = MARKERS[i % len(MARKERS)], SIX_COLOURS[i % 6]
            axes.plot(at, gain, label=model, marker=mark, color=colour, linestyle="none")
            for j, (x, y, point) in enumerate(zip(at, gain, some, strict=True)):
                place = (5, 4 if j % 2 else -11)  # names of near points, above and below in turns
                axes.annotate(point["scores"], (x, y), place, textcoords="offset points", fontsize=9)
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.margins(x=0.15)
        axes.set_xlabel(
            "softmax: " + ("effective tokens" if factor == 1 else "% of mass on other classes"), fontsize=10
        )
        axes.set_ylabel("gain of entmax (points of mIoU)", fontsize=10)
        axes.set_title("" if r is None else f"r = {r:.2f}", fontsize=10)
        dress(axes)
    if len(models) > 1:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=9, frameon=False
        )
    return png(figure)
