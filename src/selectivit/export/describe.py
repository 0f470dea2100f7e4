"""What an exported file says about itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selectivit.export.program import FeatureGraph
from selectivit.swap.attend import STATE
from selectivit.swap.sites import Preprocessing

KEY = "selectivit"
"""Name of the metadata: in ONNX's `metadata_props`; in a .pt2 an extra file, `selectivit.json`."""


def describe(
    model: nn.Module,
    expected: Preprocessing,
    size: tuple[int, int],
    outputs: dict[str, Tensor],
    *,
    dynamic: bool,
    fixed: int | None,
    bank: int | None,
    graph: FeatureGraph,
) -> dict[str, Any]:
    """Say all that a server has to know.

    Args:
        model: as the caller gave it.
        expected: its preprocessing.
        size: (height, width) that was asked for, or the model's own.
        outputs: of one image of that size.
        dynamic: whether batch, height and width are free.
        fixed: the budget, where it is a number.
        bank: the largest budget, where it is an input.
        graph: what is exported.

    Returns:
        What JSON can hold: `version`, `model`, `image` (mean, std, patch_size, height, width, layout), `inputs` and
        `outputs` with their dims in words, `attention` (by module, where it was swapped), `layer`, `norm`, `num_cores`.
    """
    from selectivit import __version__

    height, width = size
    images = ["batch", "3", "height", "width"] if dynamic else ["1", "3", str(height), str(width)]
    budget = None if bank is None else {"dtype": "int64", "dims": [], "least": 1, "most": bank}
    return {
        "version": __version__,
        "model": type(model).__name__,
        "image": {
            "mean": list(expected.mean),
            "std": list(expected.std),
            "patch_size": expected.patch_size,
            "height": height,
            "width": width,
            "layout": "RGB, (value / 255 - mean) / std, sides in whole patches",
        },
        "inputs": {
            "images": {"dtype": "float32", "dims": images},
            **({} if budget is None else {"num_cores": budget}),
        },
        "outputs": {name: _dims(name, tensor, dynamic, bank is not None) for name, tensor in outputs.items()},
        "attention": _attention(graph.model),
        "layer": graph.layer,
        "norm": graph.norm,
        "num_cores": fixed,
    }


def _dims(name: str, tensor: Tensor, dynamic: bool, free_budget: bool) -> list[str]:
    dims = [str(side) for side in tensor.shape]
    if dynamic:
        dims[0] = "batch"
        if name == "map":
            dims[2:] = ["height / patch_size", "width / patch_size"]
    if free_budget and name == "cores":
        dims[1] = "num_cores"
    return dims


def _attention(tower: nn.Module) -> dict[str, str]:
    """The rules in force, by module; the factors of a calibration are in the graph."""
    found = {}
    for name, module in tower.named_modules():
        rule = getattr(vars(module).get(STATE), "rule", None)
        if rule is not None:
            alpha = rule.alpha.tolist() if isinstance(rule.alpha, Tensor) else rule.alpha
            found[name] = f"{rule.normalizer} alpha={alpha} scores={rule.scores}"
    return found
