"""Diagnoses of several models as JSON, as panels over the blocks, as maps and as a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from selectivit.cli.compare_report import versions
from selectivit.cli.diagnosis import ATTENTION, TOKENS, Diagnosed, row
from selectivit.cli.jobs import Photo
from selectivit.data.writing import write_atomic, write_json
from selectivit.vis.blocks import Line, Panel, blocks_figure
from selectivit.vis.compare import to_png
from selectivit.vis.token_maps import token_figure

PANELS = {
    "patch_norm": ("norm of the patches", "median", True),
    "largest_norm": ("largest norm", "times the patches' median", False),
    "outlier_share": ("outliers of norm", "% of patches", False),
    "cls_norm": ("norm of CLS", "times the patches' median", False),
    "register_norm": ("norm of registers", "times the patches' median", False),
    "cls_similarity": ("patches to CLS", "mean cosine", False),
    "patch_similarity": ("patches to each other", "mean cosine", False),
    "relative_entropy": ("entropy of attention", "1: uniform over all keys", False),
    "support_share": ("support of attention", "% of weights not exactly 0", False),
}
"""Quantity -> title, unit, logarithmic axis; registers are drawn and told where a model has some."""
PERCENT = ("outlier_share", "support_share")


def report(
    found: Sequence[Diagnosed],
    photos: Sequence[Photo],
    out: Path,
    settings: Mapping[str, Any],
    notes: Sequence[str],
    problems: Mapping[str, str],
) -> int:
    """Write and print what was found.

    Args:
        found: one a variant, at least one.
        photos: all of them.
        out: the folder for the results.
        settings: the command's.
        notes: what else should be known.
        problems: what was asked for in vain.

    Returns:
        The exit status: 0 all done, 1 something was skipped.
    """
    notes = [*notes, *_attention_notes(found), *_size_notes(found)]
    skipped = {**problems, **{name: why for each in found for name, why in each.skipped.items()}}
    sources = {photo.name: str(photo.path) for photo in photos}
    content = {
        "settings": dict(settings),
        "versions": versions(),
        "models": [_model(each, sources) for each in found],
        "notes": notes,
        "skipped": [{"source": sources.get(name, name), "reason": why} for name, why in skipped.items()],
    }
    write_json(out / "diagnose.json", content)
    write_atomic(out / "diagnose.png", to_png(_plot(found, notes)))
    drawn = _pictures(found, out / "pictures")
    _print(found)
    for note in notes:
        print(f"note: {note}")
    for name, why in skipped.items():
        if name not in problems:
            print(f"skipped: {why}", file=sys.stderr)
    print(out / "diagnose.json", out / "diagnose.png", sep="\n")
    if drawn:
        print(f"{drawn} pictures: {out / 'pictures'}")
    return 1 if skipped else 0


def _model(each: Diagnosed, sources: Mapping[str, str]) -> dict[str, Any]:
    mean: dict[str, Any] = {}
    for name in (*TOKENS, *ATTENTION):
        column = each.column(name)
        mean[name] = None if column is None else column.mean(0).tolist()
    return {
        "label": each.variant.label,
        "model": each.variant.model,
        "attention": each.variant.attention,
        "mean": mean,
        "missing": each.missing(),
        "photos": [
            {"source": sources[name], **{k: v for k, v in record.items() if k not in ("missing", "note")}}
            for name, record in each.records.items()
        ],
    }


def _attention_notes(found: Sequence[Diagnosed]) -> list[str]:
    told = [(each.variant.label, next(iter(each.records.values()))["note"]) for each in found]
    missing = [
        f"{each.variant.label}: no {', '.join(name.replace('_', ' ') for name in names)}: {why}"
        for each in found
        for why, names in _by_reason(each.missing()).items()
        if names != ["register_norm"]
    ]
    return [f"{label}: {note}" for label, note in told if note] + missing


def _by_reason(missing: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, why in missing.items():
        reasons.setdefault(why, []).append(name)
    return reasons


def _size_notes(found: Sequence[Diagnosed]) -> list[str]:
    grids = {each.variant.label: tuple(next(iter(each.records.values()))["grid"]) for each in found}
    if len(set(grids.values())) < 2:
        return []
    told = ", ".join(f"{label} {h} x {w}" for label, (h, w) in grids.items())
    return [f"the models see grids of different size ({told} on the first photo): --size may bring them together"]


def _plot(found: Sequence[Diagnosed], notes: Sequence[str]) -> Any:
    count = max(len(each.records) for each in found)
    panels = []
    for name, (title, unit, log) in _panels(found).items():
        lines = [_line(each, name) for each in found]
        missing = next((each.missing()[name] for each in found if name in each.missing()), "")
        panels.append(Panel(title, unit, lines, log, f"{title}:\n{missing}"))
    band = ", band: the middle 80 % of them" if count > 4 else ""
    title = f"mean over {count} photo{'s' if count > 1 else ''}{band}"
    return blocks_figure(panels, columns=3 if len(panels) == 9 else 4, title=title, note="\n".join(notes))


def _panels(found: Sequence[Diagnosed]) -> dict[str, tuple[str, str, bool]]:
    there = any(each.column("register_norm") is not None for each in found)
    return {name: panel for name, panel in PANELS.items() if there or name != "register_norm"}


def _line(each: Diagnosed, name: str) -> Line:
    column = each.column(name)
    if column is None:
        return Line(each.variant.label, ())
    column = column * (100 if name in PERCENT else 1)
    low, high = ((), ())
    if len(column) > 4:
        low, high = (_list(column.quantile(q, dim=0)) for q in (0.1, 0.9))
    return Line(each.variant.label, _list(column.mean(0)), low, high)


def _list(values: Tensor) -> list[float]:
    return values.tolist()


def _pictures(found: Sequence[Diagnosed], folder: Path) -> int:
    """Draw the photos that every variant has maps of."""
    names = [name for name in found[0].pictures if all(name in each.pictures for each in found)]
    drawn = 0
    for name in names:
        rows = [row(each.variant.label, each.pictures[name][1]) for each in found]
        count = min(len(r.maps) for r in rows)  # models of few blocks have fewer maps: show as many of all
        rows = [type(r)(r.label, dict(list(r.maps.items())[-count:]), r.norms, r.outliers, r.similarity) for r in rows]
        figure = token_figure(found[0].pictures[name][0], rows, title=name)
        write_atomic(folder / f"{name}.png", to_png(figure))
        drawn += 1
    return drawn


def _print(found: Sequence[Diagnosed]) -> None:
    """Print the last block's numbers, a column a model, and where outliers are most."""
    from rich.console import Console
    from rich.table import Table

    table = Table("last block", "unit", title=f"mean over {max(len(each.records) for each in found)} photos")
    for each in found:
        table.add_column(each.variant.label, justify="right")
    for name, (title, unit, _) in _panels(found).items():
        scale = 100 if name in PERCENT else 1
        columns = [each.column(name) for each in found]
        table.add_row(title, unit, *("–" if c is None else f"{scale * c[:, -1].mean().item():.3g}" for c in columns))
    Console().print(table)
    for each in found:
        shares = each.column("outlier_share")
        if shares is not None and shares.max() > 0:
            block = int(shares.mean(0).argmax())
            most = f"{100 * shares[:, block].mean().item():.2f} % of patches"
            print(f"{each.variant.label}: most outliers at block {block}, {most}")
