"""Analyses of attention in a frozen model: one kind a sub-command, each with a table, a JSON file and a picture.

The data is a folder of photos with masks of classes, as `selectivit segment-eval` takes it. Results are noted photo by
photo and shared between the kinds, so a run that was stopped goes on where it was, and numbers that one kind has made
another does not make again. Under torchrun the photos are split among the processes, with the same result.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse
from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.analysis_kinds import KINDS, Cell, Kind, sources
from selectivit.cli.analysis_options import DataOptions, ReadingOptions
from selectivit.cli.journal import Journal
from selectivit.cli.options import RunOptions, add_options, parse_layers, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    from selectivit.cli.analysis_results import Spread
    from selectivit.data.segmentation import SegmentationData
    from selectivit.openvocab.presets import Preset

HELP = "diffuseness of attention, entmax's gain against it, controls, resolution, backbones, depth and alpha"
MODEL = "open_clip:ViT-B-16/openai"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    kinds = parser.add_subcommands(dest="kind", metavar="KIND", title="kinds")
    for name, kind in KINDS.items():
        sub = jsonargparse.ArgumentParser(description=kind.help)
        sub.add_argument("--config", action="config", help="file with options of this analysis, YAML or JSON")
        sub.add_argument("data", type=str, help="folder of photos and masks of classes")
        kinds.add_subcommand(name, sub, help=kind.help)
        add_options(sub, RunOptions, model=MODEL)
        add_options(sub, DataOptions)
        add_options(sub, kind.options)
        if kind.reads:
            add_options(sub, ReadingOptions)


def run(options: Namespace) -> int:
    """Analyse and write.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 photos were left out, 2 nothing could be done.

    Raises:
        ValueError: no data, an unknown model, preset, source or layer, no text tower where one is needed.
        WriteError: the folder cannot be written to.
    """
    with torchrun_ranks() as ranks:
        return _run(options.kind, options[options.kind], ranks)


def _run(name: str, options: Namespace, ranks: Ranks) -> int:
    from selectivit.cli.analysis_report import report
    from selectivit.cli.analysis_results import Study
    from selectivit.cli.analysis_work import Work
    from selectivit.data.segmentation import open_segmentation

    kind, where, part = KINDS[name], take(RunOptions, options), take(DataOptions, options)
    what: Any = take(kind.options, options)
    reading = take(ReadingOptions, options) if kind.reads else None
    out = Path(where.out)
    check_writable(out)
    data = open_segmentation(options.data, part.layout, part.split)
    base = None if reading is None else _base(reading, where.seed, data.layout)
    models, cells = _plan(kind, where, what, base)
    spread = _spread(name, what, base)
    places = spaced(len(data), part.photos)
    share, study = ranks.share(places), Study()
    with Journal(out / "analyse.work", ranks) as journal, contextlib.ExitStack() as stack:
        tell = stack.enter_context(progress("photos", len(share) * len(models), shown=ranks.rank == 0))
        device = pick_device(where.device, ranks.local_rank)
        work = Work(data, share, journal, study, reading, device, tell)
        for model in models:
            work.run(model, [(i, cell) for i, cell in enumerate(cells) if cell.model == model], spread)
    study, status = study.merged(ranks), 0
    if ranks.rank == 0:
        settings = _settings(where, part, what, reading, data, options.data)
        status = report(name, out, settings, cells, spread, study, data, len(places))
    return ranks.gather(status)[0]


def _base(reading: ReadingOptions, seed: int, layout: str) -> Preset:
    """The preset that all cells share, as it was published for the data, with entmax of the given alpha."""
    from selectivit.openvocab.published import preset_for

    preset = replace(preset_for(reading.preset, layout), seed=seed, normalizer="entmax", alpha=reading.alpha)
    return preset if reading.size is None else replace(preset, size=reading.size)


def _plan(kind: Kind, where: RunOptions, what: Any, base: Preset | None) -> tuple[list[str], list[Cell]]:
    models = list(dict.fromkeys(part.strip() for part in where.model.split(",")))
    if len(models) > 1 and not kind.several:
        raise ValueError(f"this analysis takes one model, got --model {where.model}")
    return models, [] if base is None else kind.cells(models, base, what)


def _spread(name: str, what: Any, base: Preset | None) -> Spread | None:
    """What is measured of the attention: all for diffuseness, softmax's in the last layer for the gain."""
    from selectivit.cli.analysis_results import Spread
    from selectivit.ops.selective import AttentionRule

    if name == "diffuseness":
        rules = [
            AttentionRule(normalizer, alpha=what.alpha, scores=source)
            for source in sources(what.scores)
            for normalizer in ("softmax", "entmax")
        ]
        return Spread(rules, parse_layers(what.layers), what.size)
    if name == "gain" and base is not None:
        return Spread([AttentionRule("softmax", scores=source) for source in sources(what.scores)], -1, base.size)
    return None


def spaced(count: int, wanted: int) -> list[int]:
    """Choose photos, evenly spread.

    Args:
        count: how many there are.
        wanted: how many at most; 0 is all.

    Returns:
        Their numbers.

    Raises:
        ValueError: fewer than none.

    Example:
        >>> spaced(10, 4), spaced(2, 0)
        ([0, 2, 5, 7], [0, 1])
    """
    if wanted < 0:
        raise ValueError(f"expected --photos of 0 (all) or more, got {wanted}")
    if wanted in (0, count) or wanted > count:
        return list(range(count))
    return [i * count // wanted for i in range(wanted)]


def _settings(
    where: RunOptions, part: DataOptions, what: Any, reading: ReadingOptions | None, data: SegmentationData, path: str
) -> dict[str, Any]:
    from selectivit import __version__

    shown = {"selectivit": __version__, "model": where.model, "seed": where.seed, "data": path, "name": data.name}
    shown |= {"layout": data.layout, "split": data.split, "photos": part.photos, **asdict(what)}
    return shown | ({} if reading is None else asdict(reading))
