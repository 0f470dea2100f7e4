"""What `selectivit regions` found, as JSON, as a table, and in words where photos were missing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selectivit.cli.region_files import Subset
from selectivit.data.writing import write_json

NAMED = 10
"""So many missing photos are named on stderr; the JSON names all."""


def report(
    path: Path,
    settings: dict[str, Any],
    subsets: Sequence[Subset],
    ranks: Mapping[str, Mapping[int, int]],
    missing: Mapping[str, str],
) -> int:
    """Write the result, print its table, name what is missing.

    Args:
        path: of the JSON file.
        settings: all that the ranks depend on.
        subsets: the annotation files.
        ranks: by subset and number of the region.
        missing: photos and reasons.

    Returns:
        The exit status: 0, 1 where photos are missing, 2 where no region was ranked.

    Raises:
        WriteError: no space, no permission.
    """
    from selectivit.openvocab.regions import mean_hard_medium_easy

    rows = [_row(subset, ranks[subset.name]) for subset in subsets]
    top1 = {row["subset"]: row["top1"] for row in rows if row["top1"] is not None}
    mhme = mean_hard_medium_easy(top1)
    content = {"settings": settings, "subsets": rows, "mhme": mhme}
    content |= {"ranks": {name: {str(number): rank for number, rank in some.items()} for name, some in ranks.items()}}
    content |= {"missing": [{"photo": name, "reason": reason} for name, reason in missing.items()]}
    write_json(path, content)
    print(_table(rows))
    absent = [name for name in ("hard", "medium", "easy") if name not in top1]
    print(f"mHME: {100 * mhme:.2f} %" if mhme is not None else f"mHME: none without {', '.join(absent)}")
    print(path)
    if missing:
        print(f"{len(missing)} photos are left out (all named in {path}):", file=sys.stderr)
        for reason in list(missing.values())[:NAMED]:
            print(f"  {reason}", file=sys.stderr)
        if len(missing) > NAMED:
            print(f"  … and {len(missing) - NAMED} more", file=sys.stderr)
    return 2 if not any(ranks.values()) else 1 if missing else 0


def _row(subset: Subset, ranks: Mapping[int, int]) -> dict[str, Any]:
    from selectivit.openvocab.regions import chance, rank_figures

    ranked = [region for region in subset.regions if region.number in ranks]
    row: dict[str, Any] = {"subset": subset.name, "file": str(subset.path)}
    row |= {"regions": len(ranked), "regions_in_file": len(subset.regions)}
    if not ranked:
        return row | dict.fromkeys(("top1", "mean_rank", "median_rank", "chance"))
    return row | rank_figures(list(ranks.values())) | {"chance": chance(ranked)}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["subset        regions      of   top-1 %  chance %  mean rank  median rank"]
    for row in rows:
        line = f"{row['subset']:<12}  {row['regions']:7}  {row['regions_in_file']:6}"
        if row["top1"] is not None:
            line += f"  {100 * row['top1']:8.2f}  {100 * row['chance']:8.2f}"
            line += f"  {row['mean_rank']:9.2f}  {row['median_rank']:11.1f}"
        lines.append(line)
    return "\n".join(lines)
