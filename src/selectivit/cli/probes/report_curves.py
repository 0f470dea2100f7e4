"""Block by block: the curves of a table in one plot."""

from __future__ import annotations

from selectivit.cli.probes.report_tables import Table
from selectivit.cli.probes.report_tasks import TASKS


def curve_picture(table: Table) -> bytes | None:
    """Draw the main number over the blocks, a line a model, attention and kind of tokens.

    Args:
        table: of runs that compare.

    Returns:
        A PNG; None where no model was probed at two blocks.
    """
    if not table.curves:
        return None
    if table.task == "point-in-box":
        return _point_in_box(table)
    from selectivit.vis.layers import layer_picture

    metric = TASKS[table.task].metrics[0]
    about = f"{TASKS[table.task].title}: {dict(table.about)['data']}"
    return layer_picture(table.curves, metric.name, metric.higher is not False, about)


def _point_in_box(table: Table) -> bytes:
    """With its intervals, and with what chance gives."""
    from selectivit.vis.blocks import Line, Panel, blocks_figure
    from selectivit.vis.compare import to_png

    lines = []
    for label, points in table.curves.items():
        by_block = {run.blocks[0]: run.result for run in table.labelled[label]}
        results = [by_block[block] for block, _ in points]
        low, high = zip(*(result["interval95"] for result in results), strict=True)
        lines.append(Line(label, [result["pib"] for result in results], low, high, round(results[0]["chance"], 3)))
    note = "band: 95 % interval (Wilson); chance: a patch drawn at random"
    about = dict(table.about)["data"]
    return to_png(blocks_figure([Panel(about, "share of photos, higher is better", lines)], note=note))
