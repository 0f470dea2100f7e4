"""Point-in-Box as JSON, as a plot over the blocks, as heat maps and as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selectivit.cli.compare_report import versions
from selectivit.cli.point_in_box_scoring import Scored
from selectivit.cli.variants import PlaceOptions
from selectivit.data.boxes import BoxData
from selectivit.data.writing import write_atomic, write_json
from selectivit.eval.point_in_box import PROTOCOL, Rules
from selectivit.vis.blocks import Line, Panel, blocks_figure
from selectivit.vis.compare import to_png
from selectivit.vis.token_maps import ScoreMaps, point_figure

SHOWN = 6  # blocks in a picture


def shown_blocks(count: int, columns: int) -> list[int]:
    """Blocks spread from the first to the last, the last among them.

    Args:
        count: blocks of the model.
        columns: how many are shown, `count` at most.

    Returns:
        Their numbers.

    Example:
        >>> shown_blocks(12, 6), shown_blocks(3, 3)
        ([1, 3, 5, 7, 9, 11], [0, 1, 2])
    """
    return [(i + 1) * count // columns - 1 for i in range(columns)]


def report(
    data_path: str,
    out: Path,
    where: PlaceOptions,
    settings: dict[str, Any],
    data: BoxData,
    rules: Rules,
    found: Sequence[Scored],
    notes: Sequence[str],
) -> int:
    """Write and print what was found.

    Args:
        data_path: as it was given.
        out: the folder for the results.
        where: the place of the computation.
        settings: the command's other options.
        data: pictures and boxes.
        rules: which photos count.
        found: one a variant, at least one.
        notes: what else should be known.

    Returns:
        The exit status: 0 all done, 1 some photos could not be used.
    """
    skipped = {name: why for scored in found for name, why in scored.skipped.items()} | dict(data.missing)
    content = {
        "protocol": PROTOCOL,
        "settings": {"data": data_path, **asdict(where), **settings},
        "versions": versions(),
        "data": {"name": data.name, "boxes_from": data.kind, "photos": len(data)},
        "models": [_model(scored) for scored in found],
        "notes": list(notes),
        "skipped": [{"source": name, "reason": why} for name, why in skipped.items()],
    }
    write_json(out / "point_in_box.json", content)
    about = f"Point-in-Box on {data.name}, {len(found[0].records)} photos"
    write_atomic(out / "point_in_box.png", to_png(_plot(found, about)))
    drawn = _pictures(found, out / "pictures")
    _print(found, data, rules)
    for note in notes:
        print(f"note: {note}")
    for name, why in skipped.items():
        print(f"skipped: {name}: {why}", file=sys.stderr)
    print(out / "point_in_box.json", out / "point_in_box.png", sep="\n")
    if drawn:
        print(f"{drawn} pictures: {out / 'pictures'}")
    return 1 if skipped else 0


def _model(scored: Scored) -> dict[str, Any]:
    blocks = [
        {"block": i, "pib": s.share, "hits": s.hits, "interval95": list(s.interval())}
        for i, s in enumerate(scored.scores())
    ]
    return {
        "label": scored.variant.label,
        "model": scored.variant.model,
        "attention": scored.variant.attention,
        "photos": len(scored.records),
        "chance": scored.chance(),
        "blocks": blocks,
        "left_out": scored.left_out,
        "records": [{"name": name, **record} for name, record in scored.records.items()],
    }


def _plot(found: Sequence[Scored], about: str) -> Any:
    lines = []
    for scored in found:
        scores = scored.scores()
        low, high = zip(*(s.interval() for s in scores), strict=True)
        lines.append(Line(scored.variant.label, [s.share for s in scores], low, high, round(scored.chance(), 3)))
    note = "band: 95 % interval (Wilson); chance: a patch drawn at random"
    return blocks_figure([Panel(about, "share of photos, higher is better", lines)], note=note)


def _pictures(found: Sequence[Scored], folder: Path) -> int:
    """Draw the photos that every variant has a picture of."""
    names = [name for name in found[0].pictures if all(name in scored.pictures for scored in found)]
    for name in names:
        shown, boxes, _ = found[0].pictures[name]
        rows = []
        # Models of unequal depth get equally many columns.
        columns = min([SHOWN, *(len(scored.pictures[name][2]) for scored in found)])
        for scored in found:
            scores = scored.pictures[name][2]
            blocks = shown_blocks(len(scores), columns)
            hits = scored.records[name]["hits"]
            maps = {f"block {b}": scores[b] for b in blocks}
            rows.append(ScoreMaps(scored.variant.label, maps, [bool(hits[b]) for b in blocks]))
        write_atomic(folder / f"{name}.png", to_png(point_figure(shown, boxes, rows, title=name)))
    return len(names)


def _print(found: Sequence[Scored], data: BoxData, rules: Rules) -> None:
    from rich.console import Console
    from rich.table import Table

    area = "" if rules.max_area == 1 else f", boxes under {100 * rules.max_area:g} % of the photo"
    which = "photos of one object" if rules.objects == "one" else "photos of one or more objects"
    table = Table("block", title=f"Point-in-Box on {data.name}: {which}{area}")
    for scored in found:
        table.add_column(f"{scored.variant.label}, {len(scored.records)} photos", justify="right")
    columns = [scored.scores() for scored in found]
    for block in range(max(map(len, columns))):
        cells = [_cell(column[block]) if block < len(column) else "" for column in columns]
        table.add_row(str(block), *cells)
    table.add_section()
    table.add_row("chance", *(f"{100 * scored.chance():.1f} %" for scored in found))
    Console().print(table)
    for reason, count in found[0].left_out.items():
        print(f"left out: {count} {reason}")


def _cell(score: Any) -> str:
    low, high = score.interval()
    return f"{100 * score.share:.1f} %  ({100 * low:.0f} to {100 * high:.0f})"
