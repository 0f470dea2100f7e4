"""The folders that probes wrote, read for a report: what is finished, and what is not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from selectivit.cli.probes.report_runs import FILES, KINDS, POINT, Run, runs_of


@dataclass
class Found:
    """What lies in the folders.

    Args:
        runs: finished ones, none twice.
        unfinished: where, and what.
    """

    runs: list[Run] = field(default_factory=list)
    unfinished: list[dict[str, str]] = field(default_factory=list)


def read_folders(paths: Sequence[str]) -> Found:
    """Read results of probes.

    Args:
        paths: folders that `selectivit probe` wrote, or folders of such.

    Returns:
        What they hold.

    Raises:
        ValueError: a folder without any, a file that is damaged or that another version wrote, nothing finished.
    """
    found = Found()
    for text in paths:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise ValueError(f"expected folders that `selectivit probe` wrote, got {text}, which is no folder")
        before = len(found.runs), len(found.unfinished)
        for each in [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]:
            _read_folder(each, found)
        if before == (len(found.runs), len(found.unfinished)):
            there = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
            raise ValueError(f"{text} holds no result of a probe: expected {', '.join(FILES)}, got {there}")
    unique: dict[str, Run] = {}
    for run in found.runs:  # a block of `layers` stands in two files, and a folder may come twice
        key = json.dumps([run.task, run.settings, run.blocks, run.model, run.result], sort_keys=True)
        unique.setdefault(key, run)
    found.runs = list(unique.values())
    found.unfinished = list({json.dumps(each): each for each in found.unfinished}.values())
    if not found.runs:
        told = "; ".join(f"{each['folder']}: {each['what']}" for each in found.unfinished)
        raise ValueError(f"no run is finished yet, so that there is nothing to report ({told})")
    return found


def _read_folder(folder: Path, found: Found) -> None:
    runs = [run for name in FILES if (folder / name).is_file() for run in runs_of(folder / name)]
    found.runs += runs
    found.unfinished += [{"folder": str(folder), "what": what} for what in _unfinished(folder, runs)]


def _all_but_block(run: Run) -> str:
    same = {name: value for name, value in run.settings.items() if name != "blocks"}
    return json.dumps([run.task, same], sort_keys=True)


def _unfinished(folder: Path, runs: Sequence[Run]) -> Iterator[str]:
    """What was begun in a folder and has not ended."""
    for path in sorted((folder / "unfinished").glob("*.pt")):
        yield f"the training of a head stopped{_step(path)}: give its command again, and it goes on"
    lines = sum(
        len([line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line])
        for path in sorted((folder / "kept").glob("*.jsonl"))
    )
    if lines and not (folder / POINT).is_file() and not (folder / "diagnose.json").is_file():
        yield f"Point-in-Box or diagnose stopped after {lines} photos: give its command again, and it goes on"
    if not runs and any((folder / "features").glob("*/settings.json")):
        yield "features are kept, and no head has ended: give the command again"
    series = {_all_but_block(run) for run in runs if run.path.name.startswith("layers.")}
    alone: dict[str, list[Run]] = {}
    for run in runs:
        if run.task in KINDS and len(run.blocks) == 1 and _all_but_block(run) not in series:
            alone.setdefault(_all_but_block(run), []).append(run)
    for some in alone.values():
        blocks = sorted(run.blocks[0] for run in some)
        if 1 < len(blocks) < some[0].depth and blocks == list(range(len(blocks))):
            told = f"blocks 0 to {blocks[-1]} of {some[0].depth} of {some[0].model}, {some[0].tokens} tokens, are there"
            yield f"`probe layers {some[0].task}` seems to have stopped: {told}"


def _step(path: Path) -> str:
    import torch

    with contextlib.suppress(Exception):  # damaged, or none of ours: unfinished all the same
        return f" after step {int(torch.load(path, weights_only=True, map_location='cpu')['step'])}"
    return ""
