"""Quality against cost, one point a budget."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from selectivit.vis.curves import COLOURS


def budget_picture(
    budgets: Sequence[int],
    quality: Sequence[float],
    costs: Mapping[str, Sequence[float]],
    limits: Mapping[str, float],
    chosen: int | None,
    about: str = "",
) -> bytes:
    """Draw quality over each cost, the points named by their budgets.

    Args:
        budgets: numbers of cores.
        quality: patch cosine of each.
        costs: title with its unit -> the cost of each budget.
        limits: by the same titles, where there is a bound.
        chosen: the recommended budget, marked; None where there is none.
        about: what was measured on what, for the title.

    Returns:
        A PNG.

    Raises:
        ValueError: no budgets, or numbers that do not match them.

    Example:
        >>> budget_picture([8, 64], [0.8, 0.85], {"time (ms)": [5.0, 9.0]}, {"time (ms)": 6.0}, 8)[1:4]
        b'PNG'
    """
    if not budgets or any(len(values) != len(budgets) for values in (quality, *costs.values())):
        raise ValueError("expected a quality and costs for each of one or more budgets")
    from matplotlib.figure import Figure

    figure, buffer = Figure(figsize=(5 * len(costs), 4), layout="constrained"), io.BytesIO()
    panels = figure.subplots(1, len(costs), squeeze=False)[0]
    for axes, (title, values), colour in zip(panels, costs.items(), COLOURS, strict=False):
        order = sorted(range(len(budgets)), key=lambda i: budgets[i])
        axes.plot([values[i] for i in order], [quality[i] for i in order], color=colour, marker="o", linewidth=2)
        for budget, cost, cosine in zip(budgets, values, quality, strict=True):
            axes.annotate(str(budget), (cost, cosine), (4, -12), textcoords="offset points", fontsize=9)
            if budget == chosen:
                mark = {"marker": "o", "markersize": 14, "fillstyle": "none", "linestyle": "none", "color": "0.2"}
                axes.plot([cost], [cosine], **mark, label=f"recommended: {chosen} cores")
        if title in limits:
            axes.axvline(limits[title], color="0.5", linestyle="--", linewidth=1, label="limit")
        if title in limits or chosen is not None:
            axes.legend(fontsize=9, frameon=False, loc="lower right")
        axes.margins(x=0.08)
        axes.set_xlabel(title, fontsize=10)
        axes.set_ylabel("cosine of patches to the teacher's", fontsize=10)
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(about, fontsize=11)
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
