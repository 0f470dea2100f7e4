"""Run an exported file and compare it with the model."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selectivit.export.program import FeatureGraph

Runner = Callable[[Tensor, "int | None"], dict[str, Tensor]]


def largest_difference(
    data: bytes, format: str, graph: FeatureGraph, trials: Sequence[tuple[Tensor, int | None]]
) -> float:
    """How far the file's outputs are from the model's.

    Args:
        data: the file.
        format: "onnx" or "torch".
        graph: what was exported.
        trials: images (B, 3, H, W), and the budget where it is an input.

    Returns:
        The largest difference of any output in any trial, over the output's largest value where that is above 1;
        infinity where a shape differs or a number is not finite.
    """
    run = onnx_runner(data) if format == "onnx" else torch_runner(data)
    worst = 0.0
    for images, budget in trials:
        with torch.no_grad():
            expected, found = graph(images, budget), run(images, budget)
        if list(expected) != list(found):
            return math.inf
        for name, tensor in expected.items():
            if tensor.shape != found[name].shape or not bool(found[name].isfinite().all()):
                return math.inf
            worst = max(worst, float((tensor - found[name]).abs().max() / tensor.abs().max().clamp_min(1)))
    return worst


def onnx_runner(data: bytes) -> Runner:
    """A function that runs an ONNX file by onnxruntime on the CPU.

    Args:
        data: the file.

    Returns:
        From images and budget to outputs by name.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(images: Tensor, budget: int | None) -> dict[str, Tensor]:
        given = {"images": images.numpy()}
        if budget is not None:
            given["num_cores"] = torch.tensor(budget).numpy()
        return {name: torch.from_numpy(found) for name, found in zip(names, session.run(names, given), strict=True)}

    return run


def torch_runner(data: bytes) -> Runner:
    """A function that runs a .pt2 file.

    Args:
        data: the file.

    Returns:
        From images and budget to outputs by name.
    """
    module = torch.export.load(io.BytesIO(data)).module()

    def run(images: Tensor, budget: int | None) -> dict[str, Tensor]:
        return module(images) if budget is None else module(images, num_cores=budget)

    return run
