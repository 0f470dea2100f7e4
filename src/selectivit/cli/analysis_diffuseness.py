"""Diffuseness in numbers: per rule, layer and head; and entmax's gain beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selectivit.cli.analysis_results import Spread, Study
from selectivit.eval.diffuseness import MEASURES, Diffuseness

Row = dict[str, Any]
DECIMALS = 6
AGAINST = ("other_classes", "effective_tokens")
"""The measures of softmax's diffuseness that the gain is set against."""


def diffuseness_rows(spread: Spread, found: Diffuseness, title: str) -> tuple[list[Row], dict[str, Any], bytes]:
    """Put measures in a table, in JSON and in a picture.

    Args:
        spread: what was measured.
        found: over all photos.
        title: of the picture.

    Returns:
        The rows of the last layer, means over its heads; all numbers; a PNG.

    Raises:
        ValueError: no patch had a class.
    """
    from selectivit.vis.diffuseness import diffuseness_picture

    means = found.means().round(decimals=DECIMALS)  # (layers, rules, measures, heads)
    names = [{"scores": rule.scores, "normalizer": rule.normalizer} for rule in spread.rules]
    rules = []
    for i, (rule, name) in enumerate(zip(spread.rules, names, strict=True)):
        layers = []
        for module, values in zip(found.layers, means[:, i], strict=True):
            heads = dict(zip(MEASURES, values.tolist(), strict=True))
            mean = dict(zip(MEASURES, values.mean(-1).round(decimals=DECIMALS).tolist(), strict=True))
            layers.append({"module": module, "mean": mean, "heads": heads})
        alpha = rule.alpha if rule.normalizer == "entmax" else None
        rules.append({**name, "alpha": alpha, "layers": layers})
    last = [{**name, **rule["layers"][-1]["mean"]} for name, rule in zip(names, rules, strict=True)]
    picture = diffuseness_picture(means, [(name["scores"], name["normalizer"]) for name in names], MEASURES, title)
    return last, {"queries": found.queries, "rules": rules}, picture


def gain_points(rows: Sequence[Row], spread: Spread, study: Study) -> list[Row]:
    """Set each source's gain beside softmax's diffuseness in the last layer.

    Args:
        rows: cells with model, scores, normalizer and mIoU.
        spread: the rules, softmax's of each source.
        study: what was found.

    Returns:
        A row a model and source.
    """
    points: dict[tuple[str, str], Row] = {}
    for row in rows:
        point = points.setdefault((row["model"], row["scores"]), {"model": row["model"], "scores": row["scores"]})
        point[f"miou_{row['normalizer']}"] = row["miou"]
    for model in dict.fromkeys(model for model, _ in points):
        means = study.diffuseness(model).means()[-1].mean(-1)  # (rules, measures)
        for rule, values in zip(spread.rules, means, strict=True):
            found = dict(zip(MEASURES, values.tolist(), strict=True))
            points[model, rule.scores] |= {name: found[name] for name in ("same_class", *AGAINST)}
    for point in points.values():
        plain, sparse = point["miou_softmax"], point["miou_entmax"]
        point["gain"] = None if plain is None or sparse is None else sparse - plain
    return list(points.values())


def correlations(points: Sequence[Row]) -> dict[str, float | None]:
    """Correlate the gain with softmax's diffuseness.

    Args:
        points: from `gain_points`.

    Returns:
        Pearson's r by measure; None for fewer than three points, or without any spread.

    Example:
        >>> some = [{"gain": x, "other_classes": 2 * x, "effective_tokens": -x} for x in (0.1, 0.2, 0.4)]
        >>> {name: round(r, 6) for name, r in correlations(some).items()}
        {'other_classes': 1.0, 'effective_tokens': -1.0}
    """
    known = [point for point in points if point["gain"] is not None]
    result: dict[str, float | None] = {}
    for name in AGAINST:
        pair = torch.tensor([[point["gain"] for point in known], [point[name] for point in known]], dtype=torch.float64)
        spread = len(known) > 2 and bool((pair.std(1) > 0).all())
        result[name] = torch.corrcoef(pair)[0, 1].item() if spread else None
    return result
