"""Look at the tokens and the attention of one or several models, block by block: what degrades, and where.

Norms and outliers of patches, how similar patches are to the class token and to each other, entropy and support of
attention, averaged over photos. Writes diagnose.json, diagnose.png with a panel a quantity and a line a model, and maps
of the first photos. Give checkpoints of a training to see how they change. A stopped run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.jobs import Outcome, Photo, find_photos
from selectivit.cli.journal import Journal, key_of
from selectivit.cli.memory import ADVICE, within_memory
from selectivit.cli.options import SwapOptions, add_options, option, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.variants import PlaceOptions, Variant, add_models, each_variant, model_names
from selectivit.data.digest import file_digest
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    from torch import nn

    from selectivit.cli.diagnosis import Diagnosed

HELP = "norms, outliers, similarity to the class token and attention of models per block, side by side"


@dataclass(frozen=True)
class DiagnoseOptions:
    """What is looked at."""

    size: int | None = option(
        None,
        "PX",
        "the photo's shorter side in pixels, then rounded to whole patches; default: each model's own size. Give one "
        "where models of several sizes are compared",
    )
    outlier_factor: float = option(2.0, "N", "a patch is an outlier over this many times its photo's median norm")
    num_cores: int | None = option(None, "N", "cores that a core-periphery model (VECA) is to use; default: all")
    pictures: int = option(4, "N", "photos whose maps are drawn")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("paths", nargs="+", type=str, help="photos, and folders that are searched for photos")
    add_models(parser)
    add_options(parser, PlaceOptions)
    add_options(parser, DiagnoseOptions)
    add_options(parser, SwapOptions, normalizer="softmax")


def run(options: Namespace) -> int:
    """Look, write, and print a table.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 something was skipped.

    Raises:
        ValueError: no photo that can be read, an unknown model, a rule that does not exist.
        WriteError: the folder cannot be written to.
    """
    with torchrun_ranks() as ranks:
        return _run(options, ranks)


def _run(options: Namespace, ranks: Ranks) -> int:
    import torch

    from selectivit.cli.diagnosis_report import report

    where, what, swap = take(PlaceOptions, options), take(DiagnoseOptions, options), take(SwapOptions, options)
    if what.pictures < 0 or not what.outlier_factor > 1:
        raise ValueError(
            f"expected --pictures of 0 or more and --outlier-factor over 1, got {what.pictures}, {what.outlier_factor}"
        )
    out, device = Path(where.out), pick_device(where.device, ranks.local_rank)
    check_writable(out)
    outcome = Outcome()
    pictures = (out / "pictures").resolve()
    photos = find_photos(options.paths, outcome, lambda _: False, first=ranks.rank == 0)
    photos = [photo for photo in photos if pictures not in photo.path.resolve().parents]
    torch.manual_seed(where.seed)
    found, notes = [], []
    for variant, model, note in each_variant(model_names(options.model), swap, where.seed, device):
        notes += [] if note is None else [note]
        found.append(_diagnose(variant, model, photos, what, where, ranks))
    if ranks.rank:
        return 0
    problems = {str(problem["reason"]): "not looked at" for problem in outcome.skipped}
    settings = {"photos": list(options.paths), **asdict(where), **asdict(what), **asdict(swap)}
    return report(found, photos, out, settings, notes, problems)


def _diagnose(
    variant: Variant,
    model: nn.Module,
    photos: Sequence[Photo],
    what: DiagnoseOptions,
    where: PlaceOptions,
    ranks: Ranks,
) -> Diagnosed:
    """Look at this process's photos through one model, and put the processes' results together."""
    from selectivit.cli.diagnosis import Diagnosed

    settings = {"kind": "diagnose", "model": variant.identity, "size": what.size, "seed": where.seed}
    settings |= {"outlier_factor": what.outlier_factor, "num_cores": what.num_cores}
    records, skipped, pictures = {}, {}, {}
    key = partial(key_of, settings)
    share, first = ranks.share(photos), {photo.name for photo in photos[: what.pictures]}
    with (
        Journal(Path(where.out) / "kept", ranks) as journal,
        progress(f"photos, {variant.label}", len(share), shown=ranks.rank == 0) as tell,
    ):
        for photo in share:
            try:
                looked = within_memory(partial(_look, photo, model, what, journal, key, photo.name in first))
            except (ValueError, OSError) as error:
                if not _is_of_the_photo(error):
                    raise
                skipped[photo.name] = str(error)
                tell(f"skipped: {error}")
                continue
            if looked is None:
                skipped[photo.name] = f"{photo.path}: not enough memory: {ADVICE}"
                tell(f"skipped: {skipped[photo.name]}")
                continue
            records[photo.name] = looked[0]
            if looked[1] is not None:
                pictures[photo.name] = looked[1]
            tell(None)
    merged: list[dict[str, Any]] = [{}, {}, {}]
    for part in ranks.gather((records, skipped, pictures)):
        for whole, piece in zip(merged, part, strict=True):
            whole |= piece
    ordered = {photo.name: merged[0][photo.name] for photo in photos if photo.name in merged[0]}
    if not ordered:
        raise ValueError(f"none of the {len(photos)} photos can be used: {next(iter(merged[1].values()), 'no photos')}")
    return Diagnosed(variant, ordered, merged[1], merged[2])


def _is_of_the_photo(error: Exception) -> bool:
    from selectivit.data.images import ImageError
    from selectivit.data.writing import WriteError

    return isinstance(error, (ImageError, OSError)) and not isinstance(error, WriteError)


def _look(
    photo: Photo, model: nn.Module, what: DiagnoseOptions, journal: Journal, key: Callable[[str], str], draws: bool
) -> tuple[Any, Any]:
    """One photo's record, kept or measured, and what is drawn of it."""
    from selectivit.cli.diagnosis import diagnose_photo, token_maps
    from selectivit.cli.reading import ready_photo

    named = key(file_digest(photo.path))
    record = journal.get(named)
    if record is not None and not draws:
        return record, None
    ready = ready_photo(photo.path, model, what.size)
    image = ready.image[None].to(next(model.parameters()).device)
    looked = diagnose_photo(model, image, outlier_factor=what.outlier_factor, num_cores=what.num_cores)
    if record is None:
        record = looked.record
        journal.add(named, record)
    return record, (ready.shown, token_maps(looked, what.outlier_factor)) if draws else None
