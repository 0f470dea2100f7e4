"""The command of a run, put together again from the settings that its JSON holds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from selectivit.cli.options import SwapOptions
from selectivit.cli.point_in_box import PointInBoxOptions
from selectivit.cli.probes.report_runs import Run

DATA = "DATA"
"""Stands for the data set's folder, which JSON does not name."""
CALIBRATION = "CALIBRATION"
"""Stands for the folder of a calibration, of which JSON holds the digest."""


def commands_of(runs: Sequence[Run]) -> list[str]:
    """The commands that make these runs, or find that they are there.

    Args:
        runs: of one table.

    Returns:
        One a line; blocks one by one stand in a command of `probe layers`. What does not change a result (device,
        batches, where features are kept) is not in them.
    """
    lines: list[str] = []
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.task == "point-in-box":
            lines.append(_point_in_box(run))
            continue
        alone = len(run.blocks) == 1
        key = {name: value for name, value in run.settings.items() if not (alone and name == "blocks")}
        groups.setdefault(json.dumps([str(run.path.parent), alone, key], sort_keys=True), []).append(run)
    for some in groups.values():
        blocks = sorted({run.blocks for run in some})
        if len(blocks) > 2:
            lines.append(_command(some[0], [block for (block,) in blocks], layers=True))
        else:
            lines += [_command(some[0], list(each)) for each in blocks]
    return list(dict.fromkeys(lines))


def _command(run: Run, blocks: list[int], layers: bool = False) -> str:
    settings, data = run.settings, run.settings["data"]
    words = ["selectivit", "probe", *(["layers"] if layers else []), run.task]
    words += [data.get("root", DATA), "--model", run.model]
    if not layers or blocks != list(range(run.depth)):
        # A number that stands alone would be taken for a list of one by none; -1 would not name the block.
        words += ["--block", ",".join(map(str, blocks))]
    words += ["--tokens", run.tokens, *([] if run.norm else ["--norm", "false"])]
    words += [] if run.num_cores is None else ["--num-cores", str(run.num_cores)]
    words += _view(settings["view"]) + _training(run)
    words += _splits(run.task, data) + _swap(run.attention)
    return shlex.join([*words, "--seed", str(run.seed), "--out", str(run.path.parent)])


def _view(view: Mapping[str, Any]) -> list[str]:
    if "crop" in view:
        crop = view["crop"]
        return ["--crop", ",".join(map(str, crop)) if isinstance(crop, list) else str(crop)]
    return ["--size", str(view["size"])]


def _training(run: Run) -> list[str]:
    settings = run.settings
    if run.task == "knn":
        return ["--k", ",".join(map(str, settings["k"])), "--temperature", f"{settings['temperature']:g}"]
    if settings["protocol"] == "logistic":
        return ["--protocol", "logistic", "--strength", ",".join(map(repr, settings["strengths"]))]
    training = settings["training"]
    if run.task == "linear":
        words = ["--epochs", str(training["epochs"]), "--views", str(training["views"])]
        return [*words, "--lr", ",".join(map(repr, settings["rates"])), "--head-batch", str(training["batch"])]
    words = ["--protocol", settings["protocol"], "--steps", str(training["steps"]), "--lr", repr(training["lr"])]
    words += ["--weight-decay", repr(training["weight_decay"])]
    return [*words, "--head-batch", str(training["batch_size"])]


def _splits(task: str, data: Mapping[str, Any]) -> list[str]:
    train, val = data["train"], data["val"]
    words: list[str] = []
    if " in the order of names" in train["split"]:  # a folder that was cut in two
        words += ["--holdout", repr(val["photos"] / (train["photos"] + val["photos"]))]
    else:
        words += ["--train-split", train["split"], "--val-split", val["split"]]
    if task == "segmentation":
        words += ["--layout", data["layout"]]
    if task == "depth":
        words += ["--eval-crop", data["scored_crop"], "--units", f"{train['units']:g}"]
        words += ["--eval-on", "OTHER_DATA"] if val["name"] != train["name"] else []
    return words


def _swap(attention: Any) -> list[str]:
    if not isinstance(attention, dict):
        return []
    words = ["--normalizer", attention["normalizer"], "--alpha", f"{attention['alpha']:g}"]
    words += ["--scores", attention["scores"], "--layers", str(attention["layers"])]
    return words + ([] if attention.get("calibration") is None else ["--calibration", CALIBRATION])


def _point_in_box(run: Run) -> str:
    settings = run.settings
    words = ["selectivit", "probe", "point-in-box", settings["data"]]
    words += [word for model in settings["models"] for word in ("--model", model)]
    for field in fields(PointInBoxOptions) + fields(SwapOptions):
        value = settings[field.name]
        default = "softmax" if field.name == "normalizer" else field.default
        if value != default and field.name not in ("batch_size", "pictures"):
            words += [
                f"--{field.name.replace('_', '-')}",
                str(value).lower() if isinstance(value, bool) else str(value),
            ]
    return shlex.join([*words, "--seed", str(run.seed), "--out", str(run.path.parent)])
