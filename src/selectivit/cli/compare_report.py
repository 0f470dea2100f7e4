"""A comparison as numbers for JSON, and as a figure."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from selectivit.cli.comparison import Comparison, View
from selectivit.vis.compare import Variant, compare_figure, to_png
from selectivit.vis.statistics import AttentionStatistics, mean_cosine

MEASURES = ("support_share", "support_size", "entropy", "effective_tokens")


def numbers(comparison: Comparison) -> dict[str, Any]:
    """Gather a comparison's numbers.

    Args:
        comparison: softmax and a swap.

    Returns:
        What json can hold: "mean" over layers, "layers" one by one with their heads, "features" with the cosine
        similarity of the two maps, "grid", "patch".
    """
    softmax, swap = comparison.softmax, comparison.swap
    cosine, least = mean_cosine([softmax.found.map[0], swap.found.map[0]])
    features = {"cosine_mean": cosine, "cosine_min": least}
    if softmax.found.cls is not None and swap.found.cls is not None:
        features["cosine_cls"] = torch.cosine_similarity(softmax.found.cls, swap.found.cls).item()
    layers = []
    for i, (name, plain) in enumerate(softmax.statistics.items()):
        factors = None if comparison.calibration is None else comparison.calibration.factors.get(name)
        layers.append(
            {
                "index": i,
                "module": name,
                "swapped": name in comparison.replaced,
                "num_tokens": plain.num_tokens,
                "factors": None if factors is None else factors.tolist(),
                "softmax": _layer(plain),
                "swap": _layer(swap.statistics[name]),
            }
        )
    return {
        "grid": list(softmax.found.grid),
        "patch": list(comparison.patch),
        "features": features,
        "mean": {"softmax": layer_means(softmax), "swap": layer_means(swap)},
        "layers": layers,
        "left_alone": dict(comparison.skipped),
    }


def layer_means(view: View) -> dict[str, float]:
    """Average each measure over heads and layers.

    Args:
        view: of one variant.

    Returns:
        A number a measure.
    """
    rows = [_layer(s) for s in view.statistics.values()]
    return {key: sum(row[key] for row in rows) / len(rows) for key in MEASURES}


def versions() -> dict[str, str]:
    """Name the versions that the numbers came from.

    Returns:
        Version by package.

    Example:
        >>> sorted(versions())
        ['python', 'selectivit', 'torch']
    """
    return {
        "selectivit": metadata.version("selectivit"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def picture(comparison: Comparison, found: dict[str, Any], shown: Tensor, name: str, title: str) -> bytes:
    """Draw the comparison.

    Args:
        comparison: softmax and a swap.
        found: its `numbers`.
        shown: the photo as the model saw it, (H, W, 3) in 0..1.
        name: of the swap, such as "entmax 1.5".
        title: of the figure.

    Returns:
        The bytes of a PNG file.
    """
    rows = [
        Variant(
            label,
            view.found.map[0].float().cpu(),
            view.cls_attention(),
            view.patch_attention(comparison.patch),
            list(view.statistics.values()),
        )
        for label, view in (("softmax", comparison.softmax), (name, comparison.swap))
    ]
    has_cls = comparison.softmax.found.cls is not None
    cls_title = "attention of CLS" if has_cls else "attention of all tokens, mean"
    return to_png(
        compare_figure(
            shown, rows, comparison.patch, title=title, note=_note(comparison, found, name), cls_title=cls_title
        )
    )


def _layer(statistics: AttentionStatistics) -> dict[str, Any]:
    heads = {key: getattr(statistics, key).tolist() for key in MEASURES}
    return {**{key: _mean(values) for key, values in heads.items()}, "heads": heads}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _note(comparison: Comparison, found: dict[str, Any], name: str) -> str:
    plain, other = found["mean"]["softmax"], found["mean"]["swap"]
    count, total = len(comparison.replaced), len(found["layers"])
    fitted = "" if comparison.calibration is None else ", scale fitted per head"
    return "\n".join(
        [
            f"{name} in {count} of {total} layers{fitted}",
            f"non-zero weights: {100 * other['support_share']:.1f} % (softmax {100 * plain['support_share']:.0f} %)",
            f"features, cosine similarity to softmax's: {found['features']['cosine_mean']:.3f}",
        ]
    )
