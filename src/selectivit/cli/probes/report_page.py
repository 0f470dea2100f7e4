"""A report as one HTML file."""

from __future__ import annotations

from html import escape

from selectivit.cli.probes.report_commands import commands_of
from selectivit.cli.probes.report_content import (
    LEGEND,
    PCA,
    REPORTED,
    Report,
    about,
    beside,
    cell_of,
    head_of,
    panel_file,
    reported_tables,
)
from selectivit.cli.probes.report_tables import Row, Table
from selectivit.cli.probes.report_tasks import TASKS, Metric
from selectivit.vis.page import folded, listing, page, picture, table


def as_page(report: Report) -> str:
    """Write the page.

    Args:
        report: whole.

    Returns:
        HTML with all pictures within.
    """
    parts = [f'<p class="soft">{escape(LEGEND)}</p>', _box("Before comparing", report.warnings)]
    parts.append(_box("Unfinished, not in the tables", [f"{e['folder']}: {e['what']}" for e in report.unfinished]))
    for task, some in report.sections():
        parts.append(f"<h2>{escape(TASKS[task].title)}</h2>")
        for place, (number, each) in enumerate(some, 1):
            if len(some) > 1:
                parts.append(f"<h3>Table {place} of {len(some)}: not to be compared with the others</h3>")
            parts += _table(number, each, report)
        parts.append(_reported(task))
    if report.photos:
        parts.append(f'<h2>Features of photos</h2><p class="soft">{escape(PCA)}</p>')
        parts += [_photo(report, number) for number in range(len(report.photos))]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts.append(f'<p class="soft">Written by <code>selectivit probe report</code>; {escape(versions)}.</p>')
    return page(report.title, "\n".join(part for part in parts if part))


def _box(title: str, texts: list[str]) -> str:
    if not texts:
        return ""
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<div class="warnings"><b>{escape(title)}</b><ul>{lines}</ul></div>'


def _table(number: int, each: Table, report: Report) -> list[str]:
    columns = head_of(each)
    rows = [[_name(row), *(_cell(row, *column) for column in columns)] for row in each.rows]
    metrics = [metric.name for metric in each.metrics]
    spans = [(name, sum(metric.name == name for metric, _ in columns)) for name in metrics]
    head = [[("model", 1), *spans]]
    if len(each.tokens) > 1:
        head.append([("", 1), *((tokens, 1) for _, tokens in columns)])
    parts = [listing(about(each)), table(head, rows, left=1)]
    name = report.curves.get(number)
    if name is not None:
        alt = f"{each.metrics[0].name} block by block: {', '.join(each.curves)}"
        parts.append(picture(report.pictures[name], alt, chart=True))
    lines = escape("\n".join(commands_of(each.runs)))
    note = "DATA stands for the data set's folder; device, batches and --cache do not change a result."
    parts.append(folded("Commands of these runs", f'<p class="soft">{escape(note)}</p><pre>{lines}</pre>'))
    return parts


def _name(row: Row) -> str:
    kind = "" if row.chosen else "block " if row.blocks.isdigit() else "blocks "
    return f"{escape(row.model)}<small>{escape(row.attention)}; {kind}{escape(row.blocks)}</small>"


def _cell(row: Row, metric: Metric, tokens: str) -> str:
    cell = cell_of(row, metric, tokens)
    if cell is None:
        return "–"
    text = f"<b>{metric.text(cell.mean)}</b>" if cell.best else metric.text(cell.mean)
    told = beside(cell, metric)
    return text + (f" <small>{escape(told)}</small>" if told else "")


def _reported(task: str) -> str:
    parts = []
    for each in reported_tables(task):
        head = [[("model", 1), *((column, 1) for column in each.columns)]]
        rows = [[escape(text) for text in row] for row in each.rows]
        parts.append(table(head, rows, left=1, caption=f"Reported: {each.source}"))
    return folded(REPORTED, "".join(parts), opened=True) if parts else ""


def _photo(report: Report, number: int) -> str:
    photo = report.photos[number]
    panels = [picture(report.pictures[panel_file(number, 0)], f"the photo {photo.name}", photo.name)]
    for place, label in enumerate(photo.panels, 1):
        panels.append(picture(report.pictures[panel_file(number, place)], f"PCA of {photo.name} by {label}", label))
    return f'<div class="panels">{"".join(panels)}</div>'
