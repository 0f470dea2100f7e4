"""Where attention goes, layer by layer and source by source; and head by head in the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from selectivit.vis.pictures import SIX_COLOURS, dress, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

PANELS = {
    "same_class": "on other patches of the same class",
    "other_classes": "on patches of other classes",
    "effective_tokens": "effective tokens: exp(entropy)",
    "support_share": "support: weights that are not exactly 0",
}


def diffuseness_picture(
    means: Tensor, rules: Sequence[tuple[str, str]], measures: Sequence[str], title: str = ""
) -> bytes:
    """Draw four measures over the layers, a line a rule, and the mass on other classes head by head below.

    Args:
        means: (layers, rules, measures, heads).
        rules: score source and normalizer of each; a colour a source, softmax dashed and others drawn through.
        measures: names; those of `PANELS` among them are drawn.
        title: of the figure.

    Returns:
        A PNG.

    Example:
        >>> import torch
        >>> diffuseness_picture(torch.rand(3, 2, 1, 2), [("qk", "softmax"), ("qk", "entmax")], ["same_class"])[1:4]
        b'PNG'
    """
    from matplotlib.figure import Figure

    shown = [(measures.index(name), name) for name in PANELS if name in measures]
    figure = Figure(figsize=(4.2 * len(shown), 8.4), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.15, 1))[:, 0]
    panels = above.subplots(1, len(shown), squeeze=False)[0]
    for axes, (place, name) in zip(panels, shown, strict=True):
        share = name != "effective_tokens"
        _lines(axes, means[:, :, place].mean(-1) * (100 if share else 1), rules)
        axes.set_title(PANELS[name], fontsize=11)
        axes.set_ylabel("% of the mass" if "class" in name else "% of all keys" if share else "tokens", fontsize=10)
        axes.set_xlabel("layer (mean over heads)", fontsize=10)
        axes.set_xticks(range(0, len(means), max(1, len(means) // 12)))
        if name == "effective_tokens":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    columns = (len(labels) + 1) // 2  # softmax above entmax
    above.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=10, frameon=False)
    place, name = next((pair for pair in shown if pair[1] == "other_classes"), shown[0])
    _heads(below, means[:, :, place], rules, PANELS[name])
    figure.suptitle(title, fontsize=12)
    return png(figure)


def _lines(axes: Axes, values: Tensor, rules: Sequence[tuple[str, str]]) -> None:
    """Values (layers, rules)."""
    order = list(dict.fromkeys(source for source, _ in rules))
    for i, (source, normalizer) in enumerate(rules):
        colour = SIX_COLOURS[order.index(source) % len(SIX_COLOURS)]
        line, mark = ("--", "o") if normalizer == "softmax" else ("-", "s")
        label, points = f"{source} {normalizer}", values[:, i].tolist()
        axes.plot(points, color=colour, linestyle=line, marker=mark, label=label, linewidth=1.8, markersize=4)
    dress(axes)


def _heads(figure: FigureBase, values: Tensor, rules: Sequence[tuple[str, str]], what: str) -> None:
    """Heat maps of layer and head, one a rule; values (layers, rules, heads)."""
    sources = list(dict.fromkeys(source for source, _ in rules))
    normalizers = list(dict.fromkeys(normalizer for _, normalizer in rules))
    panels = figure.subplots(len(normalizers), len(sources), squeeze=False)
    top = 100 * values.max().item()
    images = []
    for i, (source, normalizer) in enumerate(rules):
        axes = panels[normalizers.index(normalizer)][sources.index(source)]
        heads = 100 * values[:, i].T.double().numpy()
        images.append(axes.imshow(heads, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest"))
        axes.set_title(f"{source} {normalizer}", fontsize=10)
        axes.set_xlabel("layer", fontsize=9)
        axes.set_ylabel("head", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_yticks(range(len(heads)) if len(heads) <= 8 else range(0, len(heads), 4))
    figure.colorbar(images[0], ax=panels, label=f"% of the mass {what}")
