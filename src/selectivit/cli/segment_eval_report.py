"""The report of an evaluation: scores, settings, classes and the confusion matrix as JSON; a table for people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli.segment_eval_parts import Part
from selectivit.data.writing import write_json

if TYPE_CHECKING:
    from selectivit.data.segmentation import SegmentationData
    from selectivit.openvocab.scores import SegmentationScores

REPORT = "segment-eval.json"


def write_report(
    path: Path,
    folder: str,
    settings: dict[str, Any],
    data: SegmentationData,
    whole: Part,
    skipped: list[dict[str, Any]],
) -> SegmentationScores:
    """Write what came out.

    Args:
        path: the JSON file.
        folder: of the data set.
        settings: all that the result depends on.
        data: the data set.
        whole: what all processes counted.
        skipped: pictures that could not be used, and why.

    Returns:
        The scores.

    Raises:
        WriteError: no space, no permission.
    """
    from selectivit.openvocab.scores import SegmentationScores

    scores = SegmentationScores(data.classes, whole.confusion)
    notes = [*data.notes, *_notes(scores, data, whole)]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    table = scores.table()
    for row, words in zip(table, settings["words"], strict=True):
        row["words"] = words
    content: dict[str, Any] = {
        "miou": scores.miou,
        "mean_accuracy": scores.mean_accuracy,
        "pixel_accuracy": scores.pixel_accuracy,
        "images": len(whole.done),
        "pixels": int(scores.confusion.sum()),
        "resolution": "the masks' own",
        "folder": folder,
        "settings": settings,
        "classes": table,
        "confusion": scores.confusion.tolist(),
        "confusion_axes": "rows: classes of the masks; columns: classes found; in pixels",
        "notes": notes,
        "skipped": skipped,
    }
    write_json(path, content)
    return scores


def _notes(scores: SegmentationScores, data: SegmentationData, whole: Part) -> list[str]:
    """What is odd about the masks."""
    notes = []
    if whole.void:
        names = ", ".join(data.name_of(n) for n in whole.void[:3]) + (", …" if len(whole.void) > 3 else "")
        notes.append(f"{len(whole.void)} masks hold nothing but void: {names}")
    absent = [row["name"] for row in scores.table() if not row["pixels"]]
    if absent:
        names = ", ".join(absent[:5]) + (", …" if len(absent) > 5 else "")
        notes.append(f"{len(absent)} classes are in none of these masks: {names}; those found all the same count as 0")
    shift = scores.shift()
    if shift:
        notes.append(
            f"the labels look shifted by one: predictions fit the class {'after' if shift > 0 else 'before'} the "
            "mask's far better than its own; check --layout and how the masks were made"
        )
    return notes


def print_table(scores: SegmentationScores) -> None:
    """Print a line a class and one for all.

    Args:
        scores: of the evaluation.
    """
    wide = max(len("class"), *(len(name) for name in scores.classes))
    print(f"{'class':<{wide}}  {'IoU':>6}  {'accuracy':>8}  {'pixels':>12}")
    for row in scores.table():
        iou, accuracy = (f"{'–' if row[key] is None else format(row[key], '.4f')}" for key in ("iou", "accuracy"))
        print(f"{row['name']:<{wide}}  {iou:>6}  {accuracy:>8}  {row['pixels']:>12}")
    print(
        f"mIoU {scores.miou:.4f}, mean accuracy {scores.mean_accuracy:.4f}, pixel accuracy {scores.pixel_accuracy:.4f}"
    )
