"""A report as Markdown, its pictures in files beside it."""

from __future__ import annotations

from collections.abc import Sequence

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


def as_markdown(report: Report, pictures: str) -> str:
    """Write the text.

    Args:
        report: whole.
        pictures: the folder of the pictures, from where the text lies.

    Returns:
        Markdown as GitHub reads it.
    """
    parts = [f"# {plain(report.title)}", LEGEND]
    for title, texts in (
        ("Before comparing", report.warnings),
        ("Unfinished, not in the tables", [f"{each['folder']}: {each['what']}" for each in report.unfinished]),
    ):
        if texts:
            parts.append("\n".join([f"**{title}**", "", *(f"- {plain(text)}" for text in texts)]))
    for task, some in report.sections():
        parts.append(f"## {TASKS[task].title}")
        for place, (number, table) in enumerate(some, 1):
            if len(some) > 1:
                parts.append(f"### Table {place} of {len(some)}: not to be compared with the others")
            parts += _table(table)
            if number in report.curves:
                parts.append(f"![{TASKS[task].title} block by block]({pictures}/{report.curves[number]})")
            parts.append("<details><summary>Commands of these runs</summary>")
            parts.append("\n".join(["```", *commands_of(table.runs), "```"]))
            parts.append("</details>")
        parts += _reported(task)
    if report.photos:
        parts += ["## Features of photos", PCA]
        for number, photo in enumerate(report.photos):
            names = [photo.name, *photo.panels]
            images = [f"![{plain(name)}]({pictures}/{panel_file(number, i)})" for i, name in enumerate(names)]
            parts.append(_grid([names, images]))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts.append(f"Written by `selectivit probe report`; {versions}.")
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    r"""A text whose signs Markdown would take for its own.

    Args:
        text: any.

    Returns:
        The same on one line, escaped.

    Example:
        >>> plain("a|b_c")
        'a\\|b\\_c'
    """
    return "".join(f"\\{sign}" if sign in "\\`*_|<>[]#" else sign for sign in " ".join(text.split()))


def _table(table: Table) -> list[str]:
    columns = head_of(table)
    several = len(table.tokens) > 1
    head = ["model", "attention", "block"]
    head += [f"{metric.name}, {tokens}" if several else metric.name for metric, tokens in columns]
    rows = [
        [plain(row.model), plain(row.attention), row.blocks, *(_cell(row, *column) for column in columns)]
        for row in table.rows
    ]
    told = "\n".join(f"- {word}: {plain(text)}" for word, text in about(table))
    return [told, _grid([head, *rows])]


def _cell(row: Row, metric: Metric, tokens: str) -> str:
    cell = cell_of(row, metric, tokens)
    if cell is None:
        return "–"
    text = f"**{metric.text(cell.mean)}**" if cell.best else metric.text(cell.mean)
    told = beside(cell, metric)
    return text + (f" ({told})" if told else "")


def _reported(task: str) -> list[str]:
    parts = [f"{REPORTED}."]
    for each in reported_tables(task):
        parts += [f"Reported: {plain(each.source)}", _grid([["model", *each.columns], *each.rows])]
    return parts if len(parts) > 1 else []


def _grid(rows: Sequence[Sequence[str]]) -> str:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *others])
