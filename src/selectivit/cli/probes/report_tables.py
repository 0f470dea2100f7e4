"""Runs put together: a table a task and conditions, a row a model and block, a column a number and kind of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selectivit.cli.options import SwapOptions
from selectivit.cli.probes.report_cells import Cell, cells_of, points_of
from selectivit.cli.probes.report_runs import Run
from selectivit.cli.probes.report_tasks import TASKS, Metric, conditions_in_words
from selectivit.cli.variants import short_names, swap_name

TOKENS = ("cls", "patch", "cls+patch", "mean")
"""In the order of columns; the last is Point-in-Box's, of patches against their mean."""
FEW = 2
"""So many single blocks of a model are rows each; of more, the last and the best are."""


@dataclass
class Row:
    """A model's numbers of one choice of blocks.

    Args:
        model: a short name.
        attention: in words.
        blocks: in words.
        chosen: whether the block was chosen by the score itself.
        cells: metric -> tokens -> cell.
    """

    model: str
    attention: str
    blocks: str
    chosen: bool
    cells: dict[str, dict[str, Cell]]


@dataclass
class Table:
    """Runs that can be compared.

    Args:
        task: a key of `TASKS`.
        conditions: that all have in common.
        about: the same in words.
        protocol: with its source.
        tokens: kinds of tokens that occur.
        rows: one a model and choice of blocks.
        curves: label -> block and mean of the main metric; of two blocks or more.
        labelled: label -> the runs of its curve.
        runs: all of them.
    """

    task: str
    conditions: dict[str, Any]
    about: list[tuple[str, str]]
    protocol: dict[str, str]
    tokens: list[str]
    rows: list[Row]
    curves: dict[str, list[tuple[int, float]]]
    labelled: dict[str, list[Run]] = field(repr=False)
    runs: list[Run] = field(repr=False)

    @property
    def metrics(self) -> list[Metric]:
        """Those that occur."""
        return [metric for metric in TASKS[self.task].metrics if any(metric.name in row.cells for row in self.rows)]


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """Put runs together.

    Args:
        runs: of all kinds.

    Returns:
        Tables in the order of `TASKS`, those of a task after each other.
    """
    names = labels(runs)
    groups: dict[tuple[str, str], list[Run]] = {}
    for task in TASKS:
        for run in runs:
            if run.task == task:
                groups.setdefault((task, json.dumps(run.conditions, sort_keys=True)), []).append(run)
    return [_table(task, some, names) for (task, _), some in groups.items()]


def labels(runs: Iterable[Run]) -> dict[str, str]:
    """Short names of models, by identity; one name of two models gets a part of the weights' digest.

    Args:
        runs: of all kinds.

    Returns:
        Identity -> name, no two alike.
    """
    first: dict[str, str] = {}
    for run in runs:
        first.setdefault(run.identity, run.model)
    names = list(dict.fromkeys(first.values()))
    short = dict(zip(names, short_names(names), strict=True))
    # Point-in-Box knows a model by its name alone: there it is no other model of that name.
    count = [name for identity, name in first.items() if identity != name]
    return {
        identity: short[name] if count.count(name) < 2 or identity == name else f"{short[name]} ({identity[:6]})"
        for identity, name in first.items()
    }


def attention_in_words(attention: Any) -> str:
    """Name an attention as it stands in a result.

    Args:
        attention: a name, entmax's alpha, or the options of a swap.

    Returns:
        Such as "softmax" or "entmax 1.5, layers -4".

    Example:
        >>> attention_in_words(1.25), attention_in_words({"normalizer": "sparsemax", "layers": "-1"})
        ('entmax-1.25', 'sparsemax, layers -1')
    """
    if isinstance(attention, dict):
        known = SwapOptions.__dataclass_fields__
        return swap_name(SwapOptions(**{name: value for name, value in attention.items() if name in known}))
    return attention if isinstance(attention, str) else f"entmax-{attention:g}"


def _table(task: str, runs: list[Run], names: Mapping[str, str]) -> Table:
    tokens = [name for name in TOKENS if any(run.tokens == name for run in runs)]
    variants: dict[str, list[Run]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run)
    rows: list[Row] = []
    curves: dict[str, list[tuple[int, float]]] = {}
    labelled: dict[str, list[Run]] = {}
    first = list(dict.fromkeys(run.identity for run in runs))
    # A model's own attention before its swaps, models in the order of the folders.
    order = sorted(variants.values(), key=lambda v: (first.index(v[0].identity), isinstance(v[0].attention, dict)))
    for some in order:
        model, attention = _model(some[0], names), attention_in_words(some[0].attention)
        rows += _rows(task, some, tokens, model, attention)
        for name in tokens:
            chosen = [run for run in some if run.tokens == name and len(run.blocks) == 1]
            points = points_of(TASKS[task].metrics[0], chosen)
            if len(points) > 1:
                label = f"{model}, {attention}" + (f", {name}" if len(tokens) > 1 else "")
                curves[label], labelled[label] = points, chosen
    _mark_best(task, rows)
    about = conditions_in_words(task, runs[0].conditions)
    return Table(task, runs[0].conditions, about, runs[0].protocol, tokens, rows, curves, labelled, runs)


def _model(run: Run, names: Mapping[str, str]) -> str:
    cores = "" if run.num_cores is None else f", {run.num_cores} cores"
    return f"{names[run.identity]}{cores}{'' if run.norm else ', raw tokens'}"


def _rows(task: str, runs: list[Run], tokens: Sequence[str], model: str, attention: str) -> list[Row]:
    """The rows of one model: its blocks side by side, its only blocks, or of many the last and the best."""
    metrics = TASKS[task].metrics
    single = sorted({run.blocks[0] for run in runs if len(run.blocks) == 1})
    several = sorted({run.blocks for run in runs if len(run.blocks) > 1})
    shown: list[tuple[int, ...]] = [(b,) for b in (single if len(single) <= FEW else single[-1:])] + several
    rows = []
    for blocks in shown:
        chosen = {name: [r for r in runs if r.blocks == blocks and r.tokens == name] for name in tokens}
        rows.append(Row(model, attention, _blocks(blocks), False, cells_of(metrics, chosen)))
    best: dict[str, list[Run]] = {}
    for name in tokens:
        alone = [run for run in runs if len(run.blocks) == 1 and run.tokens == name]
        points = points_of(metrics[0], alone)
        if len(points) > FEW:
            block = (max if metrics[0].higher else min)(points, key=lambda point: point[1])[0]
            best[name] = [run for run in alone if run.blocks == (block,)]
    if best:
        cells = cells_of(metrics, best)
        for metric in metrics:
            for name, cell in cells.get(metric.name, {}).items() if metric.higher is not None else ():
                cell.block = best[name][0].blocks[0]
        rows.append(Row(model, attention, f"best of {len(single)}", True, cells))
    return rows


def _blocks(blocks: tuple[int, ...]) -> str:
    if len(blocks) > 2 and list(blocks) == list(range(blocks[0], blocks[-1] + 1)):
        return f"{blocks[0]} to {blocks[-1]}"
    return ", ".join(map(str, blocks))


def _mark_best(task: str, rows: Sequence[Row]) -> None:
    """Of two or more; rows whose block was chosen by the score are compared among themselves alone."""
    for metric in TASKS[task].metrics:
        if metric.higher is None:
            continue
        for chosen in (False, True):
            for name in TOKENS:
                found = [row.cells.get(metric.name, {}).get(name) for row in rows if row.chosen == chosen]
                cells = [cell for cell in found if cell is not None]
                if len(cells) > 1:
                    best = metric.text((max if metric.higher else min)(cell.mean for cell in cells))
                    for cell in cells:
                        cell.best = metric.text(cell.mean) == best
