"""Compute dense features of photos: one safetensors file and one PCA picture a photo, and features.json for all.

A photo whose results are there already, made from the same photo with the same settings, is kept; so a stopped run goes
on where it was. Photos that cannot be read are named and skipped. Under torchrun the photos are split among the
processes, with the same result.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.extraction import Extraction
from selectivit.cli.feature_files import holds_another
from selectivit.cli.jobs import Outcome, find_photos, finish, work_through
from selectivit.cli.options import RunOptions, SwapOptions, add_options, option, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.swapping import load_calibration, swapped, swaps
from selectivit.data.digest import tensors_digest
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    from torch import nn

    from selectivit.swap.calibration import Calibration

HELP = "compute dense features of photos, one safetensors file and one PCA picture a photo"
INDEX, FILES = "features.json", ("features", "picture")


@dataclass(frozen=True)
class FeatureOptions:
    """What to compute."""

    layer: int = option(-1, "N", "the block whose tokens are taken, counted from 0; -1 is the last")
    norm: bool = option(True, "BOOL", "pass the tokens through the model's final norm")
    size: int | None = option(
        None, "PX", "the photo's shorter side in pixels, then rounded to whole patches; default: the model's own size"
    )
    num_cores: int | None = option(
        None, "N", "cores that a core-periphery model (VECA) is to use; default: all. Its cores are written too"
    )
    batch_size: int = option(8, "N", "photos of one size that are computed at once; fewer need less memory")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("paths", nargs="+", type=str, help="photos, and folders that are searched for photos")
    add_options(parser, RunOptions)
    add_options(parser, FeatureOptions)
    add_options(parser, SwapOptions, normalizer="softmax")


def run(options: Namespace) -> int:
    """Compute and write the features.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 something was skipped, 2 nothing could be done.

    Raises:
        ValueError: no photos, an unknown model, a layer out of range, a rule that does not exist.
        WriteError: the folder cannot be written to.
    """
    with torchrun_ranks() as ranks:
        return _run(options, ranks)


def _run(options: Namespace, ranks: Ranks) -> int:
    where, what, swap = take(RunOptions, options), take(FeatureOptions, options), take(SwapOptions, options)
    if what.batch_size < 1:
        raise ValueError(f"expected --batch-size 1 or more, got {what.batch_size}")
    out, outcome = Path(where.out), Outcome()
    check_writable(out)
    photos = find_photos(options.paths, outcome, partial(holds_another, out=out), first=ranks.rank == 0)

    import torch

    from selectivit.models.weights import load_model

    torch.manual_seed(where.seed)
    model = load_model(where.model, device=str(pick_device(where.device, ranks.local_rank)))
    calibration = load_calibration(swap)
    settings = _settings(where, what, swap, model, calibration)
    attention = swapped(model, swap, where.seed, calibration) if swaps(swap) else nullcontext()
    share = ranks.share(photos)
    with attention, progress("photos", len(share), shown=ranks.rank == 0) as tell:
        job = Extraction(
            model, out, settings, what.layer, what.norm, what.size, what.batch_size, outcome, tell, what.num_cores
        )
        work_through(lambda: job.run(share), out / INDEX, settings, outcome, photos, FILES, ranks)
    return finish(out / INDEX, settings, outcome, photos, FILES, ranks)


def _settings(
    where: RunOptions, what: FeatureOptions, swap: SwapOptions, model: nn.Module, calibration: Calibration | None
) -> dict[str, Any]:
    """Gather all that the numbers depend on beside the photo: where any of it differs, results are computed anew."""
    from selectivit import __version__

    attention: Any = "softmax"
    if swaps(swap):
        factors = None if calibration is None else tensors_digest(calibration.factors)
        attention = {**asdict(swap), "calibration": factors}
    return {
        "selectivit": __version__,
        "model": where.model,
        "weights_sha256": tensors_digest(model.state_dict()),
        "layer": what.layer,
        "norm": what.norm,
        "size": what.size,
        **({} if what.num_cores is None else {"num_cores": what.num_cores}),
        "attention": attention,
        "seed": where.seed,
    }
