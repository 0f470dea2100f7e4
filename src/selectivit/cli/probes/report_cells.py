"""Numbers over seeds: mean and spread, and a number block by block."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from selectivit.cli.probes.report_runs import Run
from selectivit.cli.probes.report_tasks import Metric


@dataclass
class Cell:
    """A number over the seeds.

    Args:
        mean: over the seeds.
        std: of the sample; None of one seed.
        seeds: which.
        block: that it is of, where the row does not say it.
        interval: 95 %, where a run has one and there is one run.
        best: whether it is the best of its column.
    """

    mean: float
    std: float | None
    seeds: list[int]
    block: int | None = None
    interval: list[float] | None = None
    best: bool = False


def cells_of(metrics: Sequence[Metric], chosen: Mapping[str, list[Run]]) -> dict[str, dict[str, Cell]]:
    """The numbers of a row.

    Args:
        metrics: of the task.
        chosen: tokens -> runs of the same blocks, one a seed.

    Returns:
        metric -> tokens -> cell; what no run has is left out.
    """
    cells: dict[str, dict[str, Cell]] = {}
    for metric in metrics:
        for name, runs in chosen.items():
            values = by_seed(metric, runs)
            if values:
                mean, std = statistics.fmean(values.values()), None
                if len(values) > 1:
                    std = statistics.stdev(values.values())
                interval = runs[0].result.get("interval95") if metric.name == "PiB %" and len(values) == 1 else None
                interval = None if interval is None else [100 * edge for edge in interval]
                cells.setdefault(metric.name, {})[name] = Cell(mean, std, sorted(values), interval=interval)
    return cells


def by_seed(metric: Metric, runs: Sequence[Run]) -> dict[int, float]:
    """A number by seed; a seed counts once, since the same run made twice is no second sample.

    Args:
        metric: which.
        runs: of the same blocks, model and kind of tokens.

    Returns:
        Seed -> number of the first run that has it.
    """
    values: dict[int, float] = {}
    for run in runs:
        value = metric.of(run.result)
        if value is not None:
            values.setdefault(run.seed, value)
    return values


def points_of(metric: Metric, runs: Sequence[Run]) -> list[tuple[int, float]]:
    """A number block by block, the mean over the seeds that all blocks have, since heads of other seeds differ too.

    Args:
        metric: which.
        runs: of one model and kind of tokens; those of blocks side by side are passed over.

    Returns:
        Blocks in their order, and numbers.
    """
    blocks = sorted({run.blocks[0] for run in runs if len(run.blocks) == 1})
    values = {b: by_seed(metric, [run for run in runs if run.blocks == (b,)]) for b in blocks}
    values = {block: found for block, found in values.items() if found}
    common = set.intersection(*map(set, values.values())) if values else set()
    return [
        (block, statistics.fmean(value for seed, value in found.items() if seed in (common or found)))
        for block, found in values.items()
    ]
