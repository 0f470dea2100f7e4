"""Compute dense features of photos: one safetensors file and one PCA picture a photo, and features.json for all.

A photo whose results are there already, made from the same photo with the same settings, is kept; so a stopped run goes
on where it was. Photos that cannot be read are named and skipped. Under torchrun the photos are split among the
processes, with the same result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.extraction import Extraction, Outcome
from selectivit.cli.feature_files import Photo, holds_another
from selectivit.cli.naming import beside_others, name_outputs
from selectivit.cli.options import RunOptions, SwapOptions, add_options, option, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.swapping import load_calibration, swapped, swaps
from selectivit.data.digest import tensors_digest
from selectivit.data.writing import WriteError, check_writable, write_json

if TYPE_CHECKING:
    from torch import nn

    from selectivit.swap.calibration import Calibration

HELP = "compute dense features of photos, one safetensors file and one PCA picture a photo"


@dataclass(frozen=True)
class FeatureOptions:
    """What to compute."""

    layer: int = option(-1, "N", "the block whose tokens are taken, counted from 0; -1 is the last")
    norm: bool = option(True, "BOOL", "pass the tokens through the model's final norm")
    size: int | None = option(
        None, "PX", "the photo's shorter side in pixels, then rounded to whole patches; default: the model's own size"
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
    photos = _find(options.paths, out, outcome, first=ranks.rank == 0)

    import torch

    from selectivit.models.weights import load_model

    torch.manual_seed(where.seed)
    model = load_model(where.model, device=str(pick_device(where.device, ranks.local_rank)))
    calibration = load_calibration(swap)
    settings = _settings(where, what, swap, model, calibration)
    attention = swapped(model, swap, where.seed, calibration) if swaps(swap) else nullcontext()
    share = ranks.share(photos)
    with attention, progress("photos", len(share), shown=ranks.rank == 0) as tell:
        job = Extraction(model, out, settings, what.layer, what.norm, what.size, what.batch_size, outcome, tell)
        try:
            job.run(share)
        except KeyboardInterrupt:
            outcome.stopped = "interrupted"
            if ranks.size == 1:
                _write_index(out, settings, outcome, photos)
            raise
    whole = _merge(ranks.gather(outcome), photos)
    if ranks.rank == 0:
        _write_index(out, settings, whole, photos)
        kept = sum(entry["state"] == "kept" for entry in whole.done)
        print(f"{len(whole.done)} done ({kept} kept), {len(whole.skipped)} skipped: {out / 'features.json'}")
    # torchrun ends all processes as soon as one fails: not before the index is written.
    stopped = any(ranks.gather(whole.stopped))
    return (1 if whole.done else 2) if stopped or whole.skipped else 0


def _find(paths: Sequence[str], out: Path, outcome: Outcome, *, first: bool) -> list[Photo]:
    """Find the photos, in an order that all ranks agree on; what is not there is noted by the first rank alone."""
    from selectivit.data.find import find_images

    found, problems = find_images(paths)
    if first:
        outcome.skipped += [{"source": None, "reason": problem} for problem in problems]
        for problem in problems:
            print(f"skipped: {problem}", file=sys.stderr)
    found = [image for image in found if not _is_ours(image.path)]
    if not found:
        raise ValueError("no photo to work on: expected image files, or folders that hold some")
    names = name_outputs([(image.root, image.path) for image in found])
    names = beside_others(names, lambda i, name: holds_another(Photo(found[i].path, name), out))
    return [Photo(image.path, name) for image, name in zip(found, names, strict=True)]


def _is_ours(path: Path) -> bool:
    """Tell a picture that an earlier run left in the folder from a photo."""
    companions = {".pca.png": ".safetensors", ".compare.png": ".compare.json"}
    return any(
        path.name.endswith(end) and path.with_name(path.name.removesuffix(end) + beside).is_file()
        for end, beside in companions.items()
    )


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
        "attention": attention,
        "seed": where.seed,
    }


def _merge(parts: Sequence[Outcome], photos: Sequence[Photo]) -> Outcome:
    """Put the ranks' outcomes together in the order of the photos, whatever the order of the work."""
    place = {str(photo.path): i for i, photo in enumerate(photos)}

    def order(entry: dict[str, Any]) -> int:
        return place.get(entry["source"], -1)

    done = sorted((entry for part in parts for entry in part.done), key=order)
    skipped = sorted((entry for part in parts for entry in part.skipped), key=order)
    return Outcome(done, skipped, next((part.stopped for part in parts if part.stopped), None))


def _write_index(out: Path, settings: dict[str, Any], outcome: Outcome, photos: Sequence[Photo]) -> None:
    whole = _merge([outcome], photos)
    earlier = _earlier(out, settings, {entry["features"] for entry in whole.done})
    content = {"settings": settings, "photos": earlier + whole.done}
    content |= {"skipped": whole.skipped, "stopped": whole.stopped}
    try:
        write_json(out / "features.json", content)
    except WriteError as error:
        outcome.stopped = str(error)
        print(f"stopped: {error}", file=sys.stderr)


def _earlier(out: Path, settings: dict[str, Any], done: set[str]) -> list[dict[str, Any]]:
    """The entries of earlier runs into the same folder, whose files are still there and were not written anew."""
    path = out / "features.json"
    if not path.is_file():
        return []
    try:
        index = json.loads(path.read_text())
        entries = [entry for entry in index["photos"] if entry["features"] not in done]
        there = [e for e in entries if (out / e["features"]).is_file() and (out / e["picture"]).is_file()]
        theirs = {} if index["settings"] == settings else {"settings": index["settings"]}  # said where they differ
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        print(f"note: {path} could not be read: what earlier runs wrote is not listed in the new one", file=sys.stderr)
        return []
    found = [{**theirs, **entry, "state": "earlier"} for entry in there]
    for entry in found:
        if entry.get("settings") == settings:
            del entry["settings"]
    return found
