"""Show what a swap of the attention does to one photo: softmax and the swap side by side.

Writes a picture (features in joint PCA colours, attention of CLS and of one patch, curves over the layers) and a JSON
file with the numbers, both named after the photo.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from selectivit.cli.options import (
    RunOptions,
    SwapOptions,
    add_options,
    option,
    parse_patch,
    pick_device,
    take,
)
from selectivit.cli.progress import working
from selectivit.data.find import printable
from selectivit.data.writing import WriteError, check_writable, write_atomic, write_json

if TYPE_CHECKING:
    from torch import nn

    from selectivit.swap.calibration import Calibration

LONG = 6000  # patches

HELP = "show softmax and a swap side by side on one photo: a picture, and the numbers as JSON"


@dataclass(frozen=True)
class CompareOptions:
    """What to look at."""

    layer: int = option(-1, "N", "the layer whose features and attention are shown, counted from 0; -1 is the last")
    size: int | None = option(
        None, "PX", "the photo's shorter side in pixels, then rounded to whole patches; default: the model's own size"
    )
    patch: str | None = option(
        None,
        "ROW,COLUMN",
        "the patch whose attention is shown, counted from 0 at the upper left; default: the one with the most softmax "
        "attention from CLS, its eight neighbours counted as well",
    )
    max_support: float | None = option(
        None,
        "SHARE",
        "the largest share of non-zero weights that the calibration may leave, over 0 to 1 (no bound); default: 0.25, "
        "or the least that can be reached, where so few tokens allow no such share",
    )
    save_calibration: str | None = option(
        None, "FOLDER", "write the fitted factors there too, for --calibration of this and other commands"
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("photo", type=str, help="the photo")
    add_options(parser, RunOptions)
    add_options(parser, SwapOptions)
    parser.add_argument(
        "--calibrate",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
        help="fit a factor on the scores per layer and head, on this photo, so that the outputs stay near softmax's; "
        "entmax and sparsemax only",
    )
    add_options(parser, CompareOptions)


def run(options: Namespace) -> int:
    """Compare, write, and print a table.

    Args:
        options: the parsed options.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: no image, an unknown model, a rule that does not exist, a layer or patch out of range.
        OSError: the photo cannot be read, or the results cannot be written.
    """
    where, what, swap = take(RunOptions, options), take(CompareOptions, options), take(SwapOptions, options)
    patch = None if what.patch is None else parse_patch(what.patch)
    out, photo = Path(where.out), Path(options.photo)
    if printable(photo) != str(photo):
        raise ValueError(f"{printable(photo)} has a name that is not UTF-8, which results cannot bear; rename it")
    check_writable(out)

    import torch

    from selectivit.cli.compare_report import numbers, picture, versions
    from selectivit.cli.comparison import compare_photo
    from selectivit.cli.reading import ready_photo
    from selectivit.data.images import read_image
    from selectivit.models.weights import load_model

    read_image(photo, shorter_side=64)  # a photo that cannot be read is told before weights are fetched
    torch.manual_seed(where.seed)
    device = pick_device(where.device)
    model = load_model(where.model, device=str(device))
    ready = ready_photo(photo, model, what.size)
    images = ready.image[None].to(device)  # (1, 3, H, W)
    fit = {"calibrate": options.calibrate, "max_support": what.max_support}
    _warn_of_long_work(ready.image.shape[-2:], model)
    with working("looking with softmax, calibrating, looking with the swap"):
        comparison = compare_photo(model, images, swap, seed=where.seed, layer=what.layer, patch=patch, **fit)

    found, fitted = numbers(comparison), comparison.calibration
    drawn, report = out / f"{photo.stem}.compare.png", out / f"{photo.stem}.compare.json"
    content = {
        "photo": str(photo),
        "notes": [*ready.notes, *comparison.notes],
        "image_size": list(ready.shown.shape[:2]),
        "settings": {
            **asdict(where),
            "device": str(device),
            **asdict(swap),
            **asdict(what),
            "max_support": what.max_support if fitted is None else fitted.fitted_on.get("max_support"),
            "calibrated": fitted is not None,
        },
        "versions": versions(),
        **found,
        "files": [str(drawn), str(report)],
    }
    model_name = Path(where.model).name if Path(where.model).is_dir() else where.model
    write_atomic(drawn, picture(comparison, found, ready.shown, _name(swap), f"{model_name}, {photo.name}"))
    write_json(report, content)
    if what.save_calibration is not None and fitted is not None:
        _save(fitted, Path(what.save_calibration))
    _print(found, _name(swap), comparison.notes)
    print(drawn, report, sep="\n")
    return 0


def _save(calibration: Calibration, folder: Path) -> None:
    try:
        calibration.save(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"cannot write the calibration to {folder}: {reason}; choose another folder") from error


def _warn_of_long_work(size: Sequence[int], model: nn.Module) -> None:
    """Say before it starts that a photo is so large that the numbers over all token pairs take minutes."""
    from selectivit.features import preprocessing

    patch = preprocessing(model).patch_size
    tokens = (size[0] // patch) * (size[1] // patch)
    if tokens > LONG:
        print(f"note: {tokens} patches: their pairs take minutes to go through; --size makes it less", file=sys.stderr)


def _name(swap: SwapOptions) -> str:
    """Name a swap in a few letters, such as "entmax 1.5, qq"."""
    alpha = f" {swap.alpha:g}" if swap.normalizer == "entmax" else ""
    scores = f", {swap.scores}" if swap.scores != "qk" else ""
    return f"{swap.normalizer.replace('_', ' ')}{alpha}{scores}"


def _print(found: dict[str, Any], name: str, notes: Sequence[str]) -> None:
    """Print the means over layers as a table, and below it what else should be known."""
    from rich.console import Console
    from rich.table import Table

    table = Table("mean over layers", title=f"cosine similarity of features: {found['features']['cosine_mean']:.4f}")
    for title in ("non-zero weights", "support size", "entropy (nats)", "effective tokens"):
        table.add_column(title, justify="right")
    for label, key in (("softmax", "softmax"), (name, "swap")):
        mean = found["mean"][key]
        table.add_row(
            label,
            f"{100 * mean['support_share']:.2f} %",
            f"{mean['support_size']:.1f}",
            f"{mean['entropy']:.3f}",
            f"{mean['effective_tokens']:.1f}",
        )
    Console().print(table)
    for note in notes:
        print(f"note: {note}")
