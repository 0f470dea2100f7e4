"""Several models in one command, each with its own attention and, where a swap is asked for, with that too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from selectivit.cli.options import SwapOptions, option
from selectivit.cli.swapping import load_calibration, swapped, swaps

if TYPE_CHECKING:
    import torch
    from torch import nn

CONFIG = "config.json"


@dataclass(frozen=True)
class PlaceOptions:
    """Where a command computes, and where it writes; these mean the same in every command."""

    out: str = option("out", "FOLDER", "folder for the results, made if it is not there")
    device: str = option(
        "auto", "DEVICE", "cpu, cuda, cuda:1 or mps; auto is a CUDA card if there is one, else the CPU"
    )
    seed: int = option(0, "N", "seed of all random numbers")


@dataclass(frozen=True)
class Variant:
    """One line of a plot.

    Args:
        label: a short name, no two alike.
        model: what `load_model` takes.
        attention: "softmax", or all that decides the swap, as JSON can hold it.
        identity: all that its tokens depend on beside the photo.
    """

    label: str
    model: str
    attention: Any
    identity: dict[str, Any]


def add_models(parser: ArgumentParser) -> None:
    """Declare the option --model, which may come several times.

    Args:
        parser: the command's parser.
    """
    parser.add_argument(
        "--model",
        action="append",  # without a type: with one, jsonargparse takes a list in a --config file for text
        metavar="NAME",
        help="pretrained model, or a local folder; see `selectivit models`. Give it several times to compare, or a "
        "folder of checkpoints' folders (default: dinov2-small)",
    )


def model_names(given: str | Sequence[str] | None) -> list[str]:
    """The models that were asked for; a folder of checkpoints stands for all of them, in the order of their numbers.

    Args:
        given: values of --model, or None; a single one from a file of options may come by itself.

    Returns:
        What `load_model` takes, no two alike.

    Raises:
        ValueError: a folder that holds neither a model nor folders of models.

    Example:
        >>> model_names(None), model_names(["a", "b", "a"])
        (['dinov2-small'], ['a', 'b'])
    """
    names: list[str] = []
    for name in [given] if isinstance(given, str) else given or ["dinov2-small"]:
        folder = Path(name).expanduser()
        if not folder.is_dir() or (folder / CONFIG).is_file() or any(folder.glob("*config.json")):
            names.append(name)
            continue
        inside = sorted((p.parent for p in folder.glob(f"*/{CONFIG}")), key=_natural)
        if not inside:
            raise ValueError(f"{folder} holds neither a model ({CONFIG} and weights) nor folders of models")
        names += map(str, inside)
    return list(dict.fromkeys(names))


def _natural(path: Path) -> list[Any]:
    """For an order in which step-9 comes before step-10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path.name)]


def short_names(names: Sequence[str]) -> list[str]:
    """Names for a legend: folders by as much of their path's end as tells them apart.

    Args:
        names: no two alike.

    Returns:
        Short names, no two alike, in the same order.

    Example:
        >>> short_names(["dinov2-small", "/a/run1/best", "/a/run2/best", "/a/final"])
        ['dinov2-small', 'run1/best', 'run2/best', 'final']
    """
    parts = [Path(name).resolve().parts[1:] if Path(name).is_dir() or name[:1] in "/." else (name,) for name in names]
    length = [1] * len(names)
    while True:
        short = ["/".join(p[-n:]) for p, n in zip(parts, length, strict=True)]
        grow = [i for i, name in enumerate(short) if short.count(name) > 1 and length[i] < len(parts[i])]
        if not grow:
            return short
        for i in grow:
            length[i] += 1


def each_variant(
    names: Sequence[str], swap: SwapOptions, seed: int, device: torch.device
) -> Iterator[tuple[Variant, nn.Module, str | None]]:
    """Load model after model, and give it as it is and then swapped.

    Args:
        names: from `model_names`.
        swap: the options of the swap.
        seed: of the random mask.
        device: where the models are put.

    Returns:
        An iterator over variants with their models; the third is a note where the model cannot be swapped, and then
        there is no model's swapped variant.

    Raises:
        ValueError: an unknown model, a rule that does not exist, a layer out of range.
    """
    from selectivit.data.digest import tensors_digest
    from selectivit.eval.identity import model_identity
    from selectivit.models.weights import load_model
    from selectivit.swap.sites import find_sites

    calibration = load_calibration(swap)
    for name, short in zip(names, short_names(names), strict=True):
        model = load_model(name, device=str(device))
        wanted = swaps(swap)
        possible = wanted and bool(find_sites(model)[0])
        note = None if possible or not wanted else f"{short}: its attention cannot be swapped, so it is shown as it is"
        plain = model_identity(model, name)
        yield Variant(short, name, "softmax", plain), model, note
        if possible:
            factors = None if calibration is None else tensors_digest(calibration.factors)
            attention = {**asdict(swap), "calibration": factors}
            with swapped(model, swap, seed, calibration):
                label = f"{short}, {swap_name(swap)}"
                yield Variant(label, name, attention, {**plain, "attention": attention}), model, None


def swap_name(swap: SwapOptions) -> str:
    """Name a swap in a few letters.

    Args:
        swap: the options.

    Returns:
        Such as "entmax 1.5, qq".

    Example:
        >>> swap_name(SwapOptions(layers="-4"))
        'entmax 1.5, layers -4'
    """
    alpha = f" {swap.alpha:g}" if swap.normalizer == "entmax" else ""
    scores = f", {swap.scores}" if swap.scores != "qk" else ""
    layers = "" if str(swap.layers) == "all" else f", layers {swap.layers}"
    fitted = "" if swap.calibration is None else ", calibrated"
    return f"{swap.normalizer.replace('_', ' ')}{alpha}{scores}{layers}{fitted}"
