"""All that a report says, before it is a page, a text or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from selectivit.cli.probes.report_cells import Cell
from selectivit.cli.probes.report_commands import commands_of
from selectivit.cli.probes.report_photos import PhotoPanels
from selectivit.cli.probes.report_tables import Row, Table
from selectivit.cli.probes.report_tasks import TASKS, Metric
from selectivit.eval.reported import reported_for

LEGEND = (
    "Measured here. Bold: the best of its column; rows whose block was chosen by this very score are compared among "
    "themselves alone. ± is the standard deviation over n seeds of the head; curves are means over the seeds that all "
    "their blocks have."
)
REPORTED = "Reported by papers: not measured here; of other models, data and protocols, so in no ranking with the above"
PCA = (
    "The last block's patches in the colours of their three principal components. One model's attentions share their "
    "colours; colours of different models have nothing in common."
)


@dataclass(frozen=True)
class Report:
    """A report.

    Args:
        title: of the page.
        tables: in their order.
        pictures: file name -> PNG, the curves and the panels.
        curves: a table's number -> file name.
        photos: PCA panels; file names by `panel_file`.
        warnings: what must be known before numbers are compared.
        unfinished: folder and what, of runs that have not ended.
        versions: of the programs.
    """

    title: str
    tables: list[Table]
    pictures: dict[str, bytes]
    curves: dict[int, str]
    photos: list[PhotoPanels]
    warnings: list[str]
    unfinished: list[dict[str, str]]
    versions: dict[str, str]

    def sections(self) -> Iterator[tuple[str, list[tuple[int, Table]]]]:
        """Tasks, each with its tables by number."""
        for task in TASKS:
            some = [(number, table) for number, table in enumerate(self.tables) if table.task == task]
            if some:
                yield task, some


def panel_file(photo: int, panel: int) -> str:
    """The file of a panel; the photo itself is panel 0."""
    return f"pca.{photo}.{panel}.png"


def head_of(table: Table) -> list[tuple[Metric, str]]:
    """The columns of numbers: each metric of each kind of tokens that has some."""
    return [
        (metric, tokens)
        for metric in table.metrics
        for tokens in table.tokens
        if any(tokens in row.cells.get(metric.name, {}) for row in table.rows)
    ]


def about(table: Table) -> list[tuple[str, str]]:
    """Conditions and protocol in words."""
    tokens = [("tokens", table.tokens[0])] if len(table.tokens) == 1 else []
    told = [("protocol" if name == "name" else name, text) for name, text in table.protocol.items()]
    return [*table.about, *tokens, *told]


def cell_of(row: Row, metric: Metric, tokens: str) -> Cell | None:
    """A row's number; None where there is none."""
    return row.cells.get(metric.name, {}).get(tokens)


def beside(cell: Cell, metric: Metric) -> str:
    """What stands beside a number: its spread, its interval, its block."""
    told = []
    if cell.std is not None:
        told.append(f"± {metric.text(cell.std)}, n {len(cell.seeds)}")
    if cell.interval is not None:
        told.append(f"{cell.interval[0]:.0f} to {cell.interval[1]:.0f}")
    if cell.block is not None:
        told.append(f"block {cell.block}")
    return "; ".join(told)


@dataclass(frozen=True)
class ReportedTable:
    """What one paper reports of a task, as text.

    Args:
        source: the paper, and what is known of how the numbers came about.
        columns: data sets with the metric.
        rows: a model and its numbers, "–" where there is none.
    """

    source: str
    columns: list[str]
    rows: list[list[str]]


def reported_tables(task: str) -> list[ReportedTable]:
    """Papers' numbers of a task, a table a paper."""
    digits = {metric.name: metric for metric in TASKS[task].metrics}
    by_source: dict[str, dict[str, dict[str, str]]] = {}
    for row in reported_for(task):
        source = row.source + (f" ({row.note})" if row.note else "")
        models = by_source.setdefault(source, {})
        models.setdefault(row.model, {})[f"{row.data}, {row.metric}"] = digits[row.metric].text(row.value)
    found = []
    for source, models in by_source.items():
        columns = list(dict.fromkeys(name for numbers in models.values() for name in numbers))
        rows = [[model, *(numbers.get(name, "–") for name in columns)] for model, numbers in models.items()]
        found.append(ReportedTable(source, columns, rows))
    return found


def as_json(report: Report) -> dict[str, Any]:
    """The report for other programs.

    Args:
        report: whole.

    Returns:
        What JSON can hold: per cent and metres, as in the tables.
    """
    return {
        "title": report.title,
        "versions": report.versions,
        "tasks": [
            {
                "task": task,
                "title": TASKS[task].title,
                "measured": [_table(number, table, report) for number, table in some],
                "reported": [asdict(row) for row in reported_for(task)],
            }
            for task, some in report.sections()
        ],
        "photos": [
            {"name": photo.name, "panels": {label: panel_file(i, j) for j, label in enumerate(photo.panels, 1)}}
            for i, photo in enumerate(report.photos)
        ],
        "unfinished": report.unfinished,
        "warnings": report.warnings,
    }


def _table(number: int, table: Table, report: Report) -> dict[str, Any]:
    return {
        "about": [list(pair) for pair in table.about],
        "conditions": table.conditions,
        "protocol": table.protocol,
        "metrics": [{"name": metric.name, "higher_is_better": metric.higher} for metric in table.metrics],
        "tokens": table.tokens,
        "rows": [asdict(row) for row in table.rows],
        "curves": {label: [list(point) for point in points] for label, points in table.curves.items()},
        "picture": report.curves.get(number),
        "commands": commands_of(table.runs),
        "files": sorted({str(run.path) for run in table.runs}),
    }
