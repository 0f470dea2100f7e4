"""Write a model's features as one file, ONNX or torch.export, that runs without this package.

The file is run and compared with the model before it is put in its place. Swapped attention is written as it is, entmax
as plain operators; of a core-periphery model the budget may stay an input.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import SwapOptions, add_options, option, take
from selectivit.cli.progress import working
from selectivit.cli.swapping import load_calibration, swapped, swaps
from selectivit.data.writing import check_writable

HELP = "write a model's features as one ONNX or torch.export file"
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}


@dataclass(frozen=True)
class ExportOptions:
    """What is written, and where."""

    model: str = option("dinov2-small", "NAME", "pretrained model, or a local folder; see `selectivit models`")
    out: str = option("out", "FOLDER", "folder for the file, made if it is not there")
    format: str = option("onnx", "NAME", "onnx, or torch for torch.export (.pt2)")
    size: int | None = option(
        None, "PX", "side of the images in pixels, whole patches; default: the model's own. See --dynamic"
    )
    dynamic: bool = option(
        True, "BOOL", "take any number of images of any height and width; with false one image of --size"
    )
    num_cores: str | None = option(
        None, "N", "cores that a core-periphery model (VECA) uses, or `input`: chosen at each call; default: all"
    )
    layer: int = option(-1, "N", "the block whose tokens are taken, counted from 0; -1 is the last")
    norm: bool = option(True, "BOOL", "pass the tokens through the model's final norm")
    seed: int = option(0, "N", "seed of all random numbers")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    add_options(parser, ExportOptions)
    add_options(parser, SwapOptions, normalizer="softmax")


def run(options: Namespace) -> int:
    """Export, check and say what the file takes and gives.

    Args:
        options: the parsed options.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: an unknown model or format, a size or budget that does not fit, a model that cannot be exported.
        WriteError: the folder cannot be written to.
        ImportError: a package that the format needs is missing.
    """
    what, swap = take(ExportOptions, options), take(SwapOptions, options)
    if what.format not in SUFFIXES:
        raise ValueError(f"expected --format {' or '.join(SUFFIXES)}, got {what.format!r}")
    budget = _budget(what.num_cores)
    out = Path(what.out)
    check_writable(out)
    path = out / f"{file_name(what.model)}{SUFFIXES[what.format]}"

    from contextlib import nullcontext

    from selectivit.export.files import export_features
    from selectivit.models.weights import load_model

    model = load_model(what.model)
    calibration = load_calibration(swap)
    attention = swapped(model, swap, what.seed, calibration) if swaps(swap) else nullcontext()
    with attention, working("exporting, then running the file"):
        done = export_features(
            model,
            path,
            format=what.format,
            size=what.size,
            dynamic=what.dynamic,
            num_cores=budget,
            layer=what.layer,
            norm=what.norm,
        )
    print(json.dumps({key: done.description[key] for key in ("inputs", "outputs", "image")}, indent=2))
    print(f"largest difference from the model: {done.largest_difference:.1e}")
    print(f"{done.path}: {done.size / 2**20:.1f} MiB")
    return 0


def file_name(model: str) -> str:
    """Make a file's name of a model's.

    Args:
        model: as load_model takes it.

    Returns:
        Its last part, without what file systems do not take.

    Example:
        >>> file_name("facebook/dinov2-small"), file_name("open_clip:ViT-B-16/openai"), file_name("runs/veca/")
        ('dinov2-small', 'ViT-B-16-openai', 'veca')
    """
    name = model.rstrip("/")
    if name.startswith("open_clip:"):
        name = name.removeprefix("open_clip:").removeprefix("hf-hub:").replace("/", "-")
    return re.sub(r"[^\w.-]+", "-", name.rpartition("/")[2]).strip(".-") or "model"


def _budget(text: str | None) -> int | str | None:
    if text in (None, "input"):
        return text
    try:
        return int(str(text))
    except ValueError:
        raise ValueError(f"expected --num-cores as a number or `input`, got {text!r}") from None
