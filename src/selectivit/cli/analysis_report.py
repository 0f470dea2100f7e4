"""What an analysis found: a table in the terminal, a JSON file, a picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.data.writing import write_atomic, write_json

if TYPE_CHECKING:
    from selectivit.cli.analysis_kinds import Cell
    from selectivit.cli.analysis_results import Spread, Study
    from selectivit.data.segmentation import SegmentationData

Row = dict[str, Any]


def report(
    kind: str,
    out: Path,
    settings: dict[str, Any],
    cells: Sequence[Cell],
    spread: Spread | None,
    study: Study,
    data: SegmentationData,
    photos: int,
) -> int:
    """Write the JSON and the picture, print the table, name what was left out.

    Args:
        kind: the analysis.
        out: the folder.
        settings: all options.
        cells: of the table.
        spread: what was measured of the attention; None if nothing was.
        study: what was found.
        data: photos and masks.
        photos: how many were to be used.

    Returns:
        The exit status.

    Raises:
        WriteError: no space, no permission.
    """
    skipped = [{"photo": data.name_of(i), "reason": study.skipped[i]} for i in sorted(study.skipped)]
    used = photos - len(skipped)
    if skipped:  # each was named when its turn came
        print(f"{len(skipped)} of {photos} photos are left out of all cells", file=sys.stderr)
    if not used:
        return 2
    names = ", ".join(_short(name.strip()) for name in settings["model"].split(","))
    title = f"{names} on {data.name} {data.split}, {used} photos"
    content: dict[str, Any] = {"kind": kind, "settings": settings, "photos": used, "skipped": skipped}
    if spread is not None and kind == "diffuseness":
        from selectivit.cli.analysis_diffuseness import diffuseness_rows

        rows, found, picture = diffuseness_rows(spread, study.diffuseness(settings["model"]), title)
        content |= found
    else:
        rows = [_row(cell, study.confusion(i, len(data.classes)), data.classes) for i, cell in enumerate(cells)]
        content["cells"] = rows
        rows, found, picture = _summary(kind, rows, spread, study, title)
        content |= found
    path, image = out / f"analyse.{kind}.json", out / f"analyse.{kind}.png"
    write_json(path, content)
    write_atomic(image, picture)
    show(rows, title)
    for name, value in found.get("correlation", {}).items():
        print(f"correlation of the gain with {name}: {'none' if value is None else f'{value:.2f}'}")
    print(path, image, sep="\n")
    return 1 if skipped else 0


def _short(model: str) -> str:
    """A model's name, a folder's without those above it."""
    return Path(model).name if Path(model).is_dir() else model


def _row(cell: Cell, counts: Any, classes: Sequence[str]) -> Row:
    from selectivit.openvocab.scores import SegmentationScores

    scores = SegmentationScores(tuple(classes), counts)
    iou = {row["name"]: row["iou"] for row in scores.table()}
    miou = None if scores.miou != scores.miou else scores.miou
    return {**cell.facts, "miou": miou, "class_iou": iou, "pixels": int(counts.sum())}


def _summary(
    kind: str, rows: Sequence[Row], spread: Spread | None, study: Study, title: str
) -> tuple[list[Row], dict[str, Any], bytes]:
    """What is printed, what else is written, and the picture."""
    from selectivit.vis.analyses import bars_picture, grid_picture, lines_picture, scatter_picture

    flat = [{k: v for k, v in row.items() if k not in ("class_iou", "pixels")} for row in rows]
    if kind == "gain":
        from selectivit.cli.analysis_diffuseness import correlations, gain_points

        assert spread is not None  # the gain is measured against it
        points = gain_points(flat, spread, study)
        found = {"points": points, "correlation": correlations(points)}
        shown = _named(points)
        return shown, found, scatter_picture(shown, found["correlation"], title)
    if kind == "resolution":
        return flat, {}, lines_picture(flat, title)
    if kind == "grid":
        return flat, {}, grid_picture(flat, title)
    series = "attention" if kind == "controls" else "normalizer"
    groups = ("scores",) if kind == "controls" or len({row.get("model") for row in flat}) == 1 else ("model", "scores")
    shown = _named(flat)
    return shown, {}, bars_picture(shown, groups, series, title)


def _named(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "model": _short(row["model"])} if "model" in row else row for row in rows]


def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print rows as a table.

    Args:
        rows: all of the same columns; shares in 0..1.
        title: above it.

    Example:
        >>> show([{"scores": "qk", "alpha": 1.2, "miou": 0.25, "effective_tokens": 12.0}], "on a toy")
        on a toy
        scores  alpha  mIoU %  effective tokens
        qk        1.2   25.00              12.0
    """
    lines = [[_heading(name, rows) for name in rows[0]]]
    lines += [[_cell(name, value) for name, value in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = [isinstance(value, str) for value in rows[0].values()]
    print(title)
    for line in lines:
        parts = zip(line, widths, left, strict=True)
        print("  ".join(text.ljust(width) if to_left else text.rjust(width) for text, width, to_left in parts).rstrip())


def _is_share(name: str) -> bool:
    return name not in ("alpha", "effective_tokens", "layers", "size")


def _heading(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    share = _is_share(name) and not any(isinstance(row[name], str) for row in rows)
    return name.replace("_", " ").replace("miou", "mIoU") + (" %" if share else "")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and name != "alpha":
        return f"{100 * value:.2f}" if _is_share(name) else f"{value:.1f}"
    return f"{value:g}" if isinstance(value, float) else str(value)
