"""Compute dense features of photos: one safetensors file and one PCA picture a photo, and features.json for all.

A photo whose results are there already, made from the same photo with the same settings, is kept; so a stopped run goes
on where it was. Photos that cannot be read are named and skipped. Under torchrun the photos are split among the
processes, with the same result.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.extraction import Extraction, Outcome
from selectivit.cli.feature_files import Photo, weights_digest
from selectivit.cli.naming import name_outputs
from selectivit.cli.options import RunOptions, SwapOptions, add_options, option, parse_layers, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.writing import WriteError, check_writable, write_json

if TYPE_CHECKING:
    from torch import nn

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
    photos = _find(options.paths, outcome, ranks)

    import torch

    from selectivit.models.weights import load_model

    torch.manual_seed(where.seed)
    model = load_model(where.model, device=str(pick_device(where.device, ranks.local_rank)))
    settings = _settings(where, what, swap, model)
    share = ranks.share(photos)
    with _swapped(model, swap, where.seed), progress("photos", len(share), shown=ranks.rank == 0) as tell:
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


def _find(paths: Sequence[str], outcome: Outcome, ranks: Ranks) -> list[Photo]:
    """Find the photos, in an order that all ranks agree on; what is not there is noted by the first rank alone."""
    from selectivit.data.images import find_images

    found: list[tuple[Path, Path]] = []  # where it was found, where it lies
    missing: list[dict[str, str]] = []
    for given in dict.fromkeys(map(Path, paths)):
        try:
            below = find_images([given])
        except (ValueError, OSError) as error:
            missing.append({"source": str(given), "reason": str(error)})
            continue
        found += [(given if given.is_dir() else given.parent, path) for path in below]
    unique: dict[Path, tuple[Path, Path]] = {}
    for root, path in found:
        if not _is_ours(path):
            unique.setdefault(path.resolve(), (root, path))
    sources = list(unique.values())
    if ranks.rank == 0:
        outcome.skipped += missing
        for entry in missing:
            print(f"skipped {entry['source']}: {entry['reason']}", file=sys.stderr)
    if not sources:
        raise ValueError("no photo to work on: expected image files, or folders that hold some")
    return [Photo(path, name) for (_, path), name in zip(sources, name_outputs(sources), strict=True)]


def _is_ours(path: Path) -> bool:
    """Tell a picture that an earlier run left in the folder from a photo."""
    return path.name.endswith(".pca.png") and path.with_name(path.name[:-8] + ".safetensors").is_file()


def _settings(where: RunOptions, what: FeatureOptions, swap: SwapOptions, model: nn.Module) -> dict[str, Any]:
    """Gather all that the numbers depend on beside the photo: where any of it differs, results are computed anew."""
    from selectivit import __version__

    attention = asdict(swap) if _swaps(swap) else {"normalizer": "softmax", "scores": "qk"}
    return {
        "selectivit": __version__,
        "model": where.model,
        "weights_sha256": weights_digest(model),
        "layer": what.layer,
        "norm": what.norm,
        "size": what.size,
        "attention": attention,
        "seed": where.seed,
    }


def _swaps(swap: SwapOptions) -> bool:
    return (swap.normalizer, swap.scores) != ("softmax", "qk")


def _swapped(model: nn.Module, swap: SwapOptions, seed: int) -> AbstractContextManager[Any]:
    if not _swaps(swap):
        return nullcontext()
    from selectivit.swap.swap import swap_attention

    return swap_attention(model, swap.normalizer, swap.alpha, swap.scores, parse_layers(swap.layers), seed=seed)


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
    content = {"settings": settings, "photos": whole.done, "skipped": whole.skipped, "stopped": whole.stopped}
    try:
        write_json(out / "features.json", content)
    except WriteError as error:
        outcome.stopped = str(error)
        print(f"stopped: {error}", file=sys.stderr)
