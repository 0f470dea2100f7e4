"""What a report says of each kind of probe: its numbers, its conditions in words, and in what two runs differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from selectivit.cli.probes import knn

Result = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """A number of a result.

    Args:
        name: with its unit, as in a table's head.
        of: from a result to the number; None where it has none.
        higher: whether more is better; None for what is no score.
        digits: behind the point.
    """

    name: str
    of: Callable[[Result], float | None]
    higher: bool | None = True
    digits: int = 2

    def text(self, value: float) -> str:
        """A value as it is shown."""
        return f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Task:
    """A kind of probe.

    Args:
        title: of its section.
        metrics: the first is the main one.
        unit: what a step of the head's training sees; "" where nothing is trained by steps.
    """

    title: str
    metrics: tuple[Metric, ...]
    unit: str = ""


def _percent(*keys: str) -> Callable[[Result], float | None]:
    def of(result: Result) -> float | None:
        value: Any = result
        for key in keys:
            value = value.get(key)
        return None if value is None else 100 * value

    return of


def _neighbours(name: str) -> Callable[[Result], float | None]:
    """Of the same k as `probe layers` takes: 20, or the nearest to it."""

    def of(result: Result) -> float | None:
        row = min(result["rows"], key=lambda row: abs(row["k"] - 20))
        return 100 * knn.headline(result) if name == "top1" else None if name not in row else 100 * row[name]

    return of


TASKS: dict[str, Task] = {
    "knn": Task("k-NN", (Metric("top-1 %", _neighbours("top1")), Metric("top-5 %", _neighbours("top5")))),
    "linear": Task(
        "Linear classifier", (Metric("top-1 %", _percent("best", "top1")), Metric("top-5 %", _percent("best", "top5")))
    ),
    "segmentation": Task(
        "Segmentation",
        (Metric("mIoU %", _percent("miou")), Metric("pixel accuracy %", _percent("pixel_accuracy"))),
        "patches",
    ),
    "depth": Task(
        "Depth",
        (
            Metric("RMSE m", lambda result: result["rmse"], False, 4),
            Metric("AbsRel", lambda result: result["abs_rel"], False, 4),
            Metric("δ1 %", _percent("delta1")),
        ),
        "photos",
    ),
    "point-in-box": Task(
        "Point-in-Box", (Metric("PiB %", _percent("pib"), True, 1), Metric("chance %", _percent("chance"), None, 1))
    ),
}
"""In the order of a report."""


def conditions_in_words(task: str, conditions: dict[str, Any]) -> list[tuple[str, str]]:
    """Say what all runs of a table have in common.

    Args:
        task: a key of `TASKS`.
        conditions: of a `Run`.

    Returns:
        Pairs of a word and a text.
    """
    data, told = conditions["data"], []
    if task == "point-in-box":
        rules = conditions["rules"]
        told += [("data", f"{data['name']}, boxes from {data['boxes_from']}, {data['scored']} photos scored")]
        area = "" if rules["max_area"] == 1 else f", boxes under {100 * rules['max_area']:g} % of the photo"
        which = "photos of one object" if rules["objects"] == "one" else "photos of one or more objects"
        told += [("photos", f"{which}{area}, classes: {rules['classes'] or 'all'}")]
        told += [("seen", f"shorter side {rules['resize']} px, middle crop {rules['size']} x {rules['size']} px")]
        return told
    train, val, classes = data["train"], data["val"], data.get("classes")
    number = f"{classes if isinstance(classes, int) else len(classes)} classes, " if classes else ""
    name = data.get("name") or train.get("name") or ""
    learnt = f"learnt from {train['photos']} photos ({train['split']})"
    scored = f"scored on {val['photos']} ({val['split']})"
    told += [("data", f"{name + ', ' if name else ''}{number}{learnt}, {scored}")]
    told += [("files", f"{train['sha256'][:8]}, {val['sha256'][:8]} (digests of names, sizes and times)")]
    told += [("seen", _seen(conditions["view"]))]
    training = conditions.get("training")
    if training and "steps" in training:
        unit = TASKS[task].unit if conditions["protocol"] == "fast" else "crops"
        told += [("steps", f"{training['steps']} of {training['batch_size']} {unit}, rate {training['lr']:g}")]
    elif training:
        crops = f"{training['views']} crops a photo of {training['crop']} px"
        told += [("steps", f"{training['epochs']} epochs of {crops}, batch {training['batch']}")]
    if "k" in conditions:
        k = min(conditions["k"], key=lambda k: abs(k - 20))
        told += [("neighbours", f"k = {k}, the nearest to 20; temperature {conditions['temperature']:g}")]
    if "scored_crop" in data:
        told += [("scored crop", data["scored_crop"])]
    return told


def _seen(view: dict[str, Any]) -> str:
    if "crop" in view:
        crop = view["crop"]
        height, width = crop if isinstance(crop, list) else (crop, crop)
        return f"crops of {height} x {width} px" + (f", windows {view['stride']} px apart" if "stride" in view else "")
    if view["kind"] == "whole":
        return f"whole photos, shorter side {view['size']} px, in whole patches"
    return f"shorter side {view['resize']} px, middle crop {view['size']} x {view['size']} px"


def differences(several: Sequence[dict[str, Any]]) -> list[str]:
    """Say in what conditions differ.

    Args:
        several: conditions of runs of one task.

    Returns:
        A text a difference; none where they are equal.

    Example:
        >>> differences([{"view": {"size": 224}}, {"view": {"size": 448}}])
        ['view size: 224 / 448']
    """
    flat = [dict(_flat("", conditions)) for conditions in several]
    told = []
    for name in dict.fromkeys(name for each in flat for name in each):
        values = [each.get(name) for each in flat]
        if len({str(value) for value in values}) == 1:
            continue
        if name.endswith("sha256"):
            told.append(f"{name.rsplit(' ', 1)[0]}: other files")
            continue
        told.append(f"{name}: {' / '.join(dict.fromkeys(_brief(value) for value in values))}")
    return list(dict.fromkeys(told))


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for name, inner in value.items() for pair in _flat(f"{prefix} {name}".strip(), inner)]
    return [(prefix, value)]


def _brief(value: Any) -> str:
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:38]}…"
