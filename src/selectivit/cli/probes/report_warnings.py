"""What a reader of a report must know before comparing its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from selectivit.cli.probes.report_runs import Run
from selectivit.cli.probes.report_tables import Table
from selectivit.cli.probes.report_tasks import TASKS, differences

NAMED = 3
"""So many skipped photos of a run are named; its JSON names all."""


def warnings_of(tables: Sequence[Table]) -> list[str]:
    """Find what cannot be compared, and what was not as it should be.

    Args:
        tables: of a report.

    Returns:
        A text each.
    """
    told: list[str] = []
    for task in dict.fromkeys(table.task for table in tables):
        some = [table for table in tables if table.task == task]
        if len(some) > 1:
            apart = "; ".join(differences([table.conditions for table in some]))
            told.append(f"{TASKS[task].title}: the {len(some)} tables do not compare with each other ({apart})")
    for table in tables:
        title = TASKS[table.task].title
        told += [f"{title}: {text}" for text in (*_repeated(table), *_uneven(table), *_other(table.runs))]
    told += _same_name([run for table in tables for run in table.runs])
    notes: dict[str, list[str]] = {}
    for run in [run for table in tables for run in table.runs]:
        for note in run.notes:
            notes[note] = list(dict.fromkeys([*notes.get(note, []), run.model]))
    return list(dict.fromkeys([*told, *(f"{', '.join(models)}: {note}" for note, models in notes.items())]))


def _repeated(table: Table) -> list[str]:
    """Runs of the same settings and seed with other results, as on another device."""
    first: dict[tuple[object, ...], Run] = {}
    told = []
    metric = TASKS[table.task].metrics[0]
    for run in table.runs:
        key = (run.variant, run.blocks, run.tokens, run.seed)
        known = first.setdefault(key, run)
        values = [metric.of(each.result) for each in (known, run)]
        if None not in values and values[0] != values[1]:
            both = " and ".join(metric.text(value) for value in values if value is not None)
            told.append(
                f"two runs of {run.model}, block {run.blocks[0]}, {run.tokens}, seed {run.seed} found {both}, in "
                f"{known.path} and {run.path}: the first is shown"
            )
    return told


def _uneven(table: Table) -> list[str]:
    """Spreads over unequally many seeds, between rows of one column."""
    metric, told = TASKS[table.task].metrics[0].name, []
    for tokens in table.tokens:
        fixed = [row.cells.get(metric, {}) for row in table.rows if not row.chosen]
        counts = sorted({len(cells[tokens].seeds) for cells in fixed if tokens in cells})
        if len(counts) > 1:
            told.append(f"{' and '.join(map(str, counts))} seeds of {tokens}")
    return [f"rows are means over unequally many seeds: {'; '.join(told)}"] if told else []


def _other(runs: Sequence[Run]) -> list[str]:
    told = []
    versions = sorted({run.version for run in runs})
    if len(versions) > 1:
        told.append(f"runs were made by selectivit {' and '.join(versions)}")
    known = [run.settings["model"]["preprocessing"][2] for run in runs if isinstance(run.settings.get("model"), dict)]
    patches = sorted(set(known))
    if len(patches) > 1:
        told.append(f"the models' patches are of {' and '.join(map(str, patches))} px: their grids differ")
    by_model: dict[str, list[str]] = {}
    for run in runs:
        by_model[run.model] = list(dict.fromkeys([*by_model.get(run.model, []), *run.skipped]))
    for model, skipped in by_model.items():
        if skipped:
            more = f" and {len(skipped) - NAMED} more" if len(skipped) > NAMED else ""
            told.append(f"{model}: photos were left out: {'; '.join(skipped[:NAMED])}{more}")
    return told


def _same_name(runs: Sequence[Run]) -> list[str]:
    identities: dict[str, set[str]] = {}
    for run in runs:
        if run.identity != run.model:
            identities.setdefault(run.model, set()).add(run.identity)
    return [
        f"{name} stands for {len(found)} models of other weights or structure: rows name a part of the weights' digest"
        for name, found in identities.items()
        if len(found) > 1
    ]
