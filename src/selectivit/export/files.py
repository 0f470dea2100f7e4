"""`export_features`: a model's features as one file that runs without this package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selectivit.data.writing import write_atomic
from selectivit.export.check import largest_difference
from selectivit.export.describe import describe
from selectivit.export.formats import FORMATS, ExportError, onnx_bytes, torch_bytes
from selectivit.export.program import FeatureGraph, feature_program, named, tower_of
from selectivit.features import features, preprocessing
from selectivit.models.veca import Veca

INPUT = "input"
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        path: the file.
        size: its bytes.
        description: what its metadata say; see `describe`.
        largest_difference: between its outputs and the model's own, over the model's largest value where that is above
            1, after the file was read and run on random images of several sizes and budgets.
    """

    path: Path
    size: int
    description: dict[str, Any]
    largest_difference: float


def export_features(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str = "onnx",
    size: int | tuple[int, int] | None = None,
    dynamic: bool = True,
    num_cores: int | str | None = None,
    layer: int = -1,
    norm: bool = True,
) -> Exported:
    """Write what `features` computes as one file, then run the file and compare.

    The image tower alone is written, without the blocks after `layer`. Attention that was swapped is written as it is:
    entmax becomes a graph of plain operators, exact and with the zeros. A server needs the file and nothing of this
    package: its metadata say how images are normalised, and what goes in and comes out.

    Args:
        model: as for `features`, in eval mode, float32, on the CPU; swapped or not.
        path: the file to write, .onnx or .pt2; an earlier one is replaced once the new one has been checked.
        format: "onnx" or "torch" (torch.export).
        size: of the images in pixels, a side or (height, width), multiples of the patch; None is the model's own size.
            With `dynamic` only what the metadata recommend.
        dynamic: any number of images of any height and width, two patches or more a side; False takes one image
            of `size`.
        num_cores: a VECA model's budget: a number; None for its whole bank; "input" for an input of that name, an int64
            scalar.
        layer: as for `features`.
        norm: as for `features`.

    Returns:
        What was written.

    Raises:
        ValueError: a model that is not as described above, an unknown format, a size that is no multiple of the patch,
            a layer out of range, a budget outside the bank or for a model that has none.
        ExportError: an operator that the format does not have, a model too large for it, or a file that gives other
            numbers than the model; the text says what to try. Nothing is written.
        WriteError: no space, no permission.
        ImportError: onnx, onnxscript or onnxruntime is missing.

    Example:
        >>> import tempfile, torchvision
        >>> vit = torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32).eval()
        >>> done = export_features(vit, tempfile.mkdtemp() + "/vit.pt2", format="torch", dynamic=False)
        >>> done.description["outputs"]["map"]
        ['1', '16', '2', '2']
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}: expected {' or '.join(map(repr, FORMATS))}")
    if format == "torch" and Path(path).suffix != ".pt2":
        raise ValueError(f"expected a path that ends in .pt2, since torch reads no other, got {os.fspath(path)!r}")
    FORMATS[format]()  # what it needs is there
    tower, expected = tower_of(model), preprocessing(model)
    height, width = _sides(size, expected.image_size, expected.patch_size)
    free = num_cores == INPUT
    fixed = _fixed_budget(tower, num_cores)
    bank = tower.config.num_cores if free and isinstance(tower, Veca) else None
    graph = FeatureGraph(tower, layer, norm, fixed).eval()
    with torch.no_grad():  # also says what cannot be before anything is traced
        outputs = named(features(tower, torch.zeros(1, 3, height, width), layer=layer, norm=norm, num_cores=fixed))
    about = describe(model, expected, (height, width), outputs, dynamic=dynamic, fixed=fixed, bank=bank, graph=graph)
    example = _example((height, width), expected, dynamic)
    names = ["images", *(["num_cores"] if free else [])]
    try:
        program = feature_program(graph, example, expected.patch_size, dynamic=dynamic, num_cores=bank)
    except Exception as error:  # torch raises whatever its tracer or the host's code met
        raise ExportError.of(error, type(tower).__name__, "torch.export", dynamic) from error
    if format == "torch":
        data = torch_bytes(program, about)
    else:
        data = onnx_bytes(program, about, names, list(outputs), type(tower).__name__, dynamic)
    trials = _trials((height, width), expected.patch_size, dynamic, bank)
    try:
        difference = largest_difference(data, format, graph, trials)
    except Exception as error:  # a runtime says in its own way that the file does not fit the images
        raise ExportError(
            f"{type(tower).__name__} was exported, but the file does not run: {' '.join(str(error).split())[:300]}; "
            f"nothing was written. Try {'dynamic=False' if dynamic else 'the other format'}"
        ) from error
    if not difference <= TOLERANCE:
        raise ExportError(
            f"the file gives other numbers than the model: they differ by {difference:.2g}, more than {TOLERANCE:g}; "
            f"nothing was written. Try the other format, or {'dynamic=False' if dynamic else 'another layer'}"
        )
    write_atomic(Path(path), data)
    return Exported(Path(path), len(data), about, difference)


def _sides(size: int | tuple[int, int] | None, own: tuple[int, int], patch: int) -> tuple[int, int]:
    height, width = own if size is None else size if isinstance(size, tuple) else (size, size)
    if min(height, width) < 1 or height % patch or width % patch:
        near = tuple(max(1, round(side / patch)) * patch for side in (height, width))
        raise ValueError(
            f"expected a size in whole patches of {patch} px, got {height} x {width}; the nearest is "
            f"{near[0]} x {near[1]}"
        )
    return height, width


def _fixed_budget(tower: nn.Module, num_cores: int | str | None) -> int | None:
    if num_cores is None or isinstance(num_cores, int):
        return num_cores  # `features` checks it
    if num_cores != INPUT:
        raise ValueError(f"expected num_cores as a number, None for all cores or {INPUT!r}, got {num_cores!r}")
    if not isinstance(tower, Veca):
        raise ValueError(f"num_cores is a budget of cores, which {type(tower).__name__} does not have")
    if tower.config.num_cores < 3:
        raise ValueError(f"a bank of {tower.config.num_cores} leaves nothing to choose: give num_cores as a number")
    return None


def _example(size: tuple[int, int], expected: Any, dynamic: bool) -> Tensor:
    """Images to trace with; where sizes are free, of a size that no host takes a shortcut for."""
    if not dynamic:
        return torch.zeros(1, 3, *size)
    patch = expected.patch_size
    own = tuple(side // patch for side in expected.image_size)
    rows, columns = next(grid for grid in ((5, 7), (6, 9)) if not set(grid) & set(own) and grid[0] * grid[1] != own[0])
    return torch.zeros(2, 3, patch * rows, patch * columns)


def _trials(size: tuple[int, int], patch: int, dynamic: bool, bank: int | None) -> list[tuple[Tensor, int | None]]:
    """Images and budgets to compare with."""
    shapes = [(1, *size), *([(3, 4 * patch, 6 * patch), (2, 2 * patch, 3 * patch)] if dynamic else [])]
    budgets = [None] * len(shapes) if bank is None else [bank, 1, max(1, bank // 2)]
    generator = torch.Generator().manual_seed(0)
    trials = [torch.randn(batch, 3, h, w, generator=generator) for batch, h, w in shapes]
    if bank is not None and not dynamic:
        trials *= len(budgets)
    return list(zip(trials, budgets, strict=True))
