"""Show what the cores of a core-periphery model (VECA) do on photos: four pictures and a JSON file of numbers a photo.

NAME.budgets.png: features in PCA colours for every budget and size. NAME.attention.png: what cores attend to, layer by
layer. NAME.paths.png: where cores are, layer by layer. NAME.listening.png: which core each patch listens to. A photo
whose results are there already, made from the same photo with the same settings, is kept; so a stopped run goes on
where it was. Under torchrun the photos are split among the processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.core_files import FILES, holds_another, kept_entry, save_look
from selectivit.cli.jobs import Outcome, Photo, each_photo, find_photos, finish, work_through
from selectivit.cli.options import RunOptions, add_options, option, parse_numbers, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.data.digest import file_digest, tensors_digest
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    from selectivit.models.veca import Veca

HELP = "show what the cores of a core-periphery model do on photos: four pictures and the numbers"
INDEX = "cores.json"


@dataclass(frozen=True)
class CoreOptions:
    """What to look at."""

    budgets: str | None = option(None, "N,N,…", "numbers of cores, up to the model's; default: 1,4,16 and all")
    sizes: str = option(
        "256,512,1024",
        "PX,PX,…",
        "the photo's shorter side in pixels, then rounded to whole patches; cores are drawn "
        "at the one nearest to the model's own",
    )
    cores: str | None = option(
        None,
        "N,N,…",
        "cores whose attention is drawn, counted from 0; default: 0, the image's own, and the five that "
        "most patches listen to in the last layer",
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("paths", nargs="+", type=str, help="photos, and folders that are searched for photos")
    add_options(parser, RunOptions, model="veca-tiny")
    add_options(parser, CoreOptions)


def run(options: Namespace) -> int:
    """Look, draw and write.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 something was skipped, 2 nothing could be done.

    Raises:
        ValueError: no photos, an unknown model or one without cores, budgets, cores or sizes that cannot be.
        WriteError: the folder cannot be written to.
    """
    with torchrun_ranks() as ranks:
        return _run(options, ranks)


def _run(options: Namespace, ranks: Ranks) -> int:
    where, what, out, outcome = take(RunOptions, options), take(CoreOptions, options), Path(options.out), Outcome()
    sizes = parse_numbers("--sizes 256,512", what.sizes)
    if sizes[0] < 1:
        raise ValueError(f"expected --sizes of 1 pixel or more, got {what.sizes!r}")
    check_writable(out)
    photos = find_photos(options.paths, outcome, partial(holds_another, out=out), first=ranks.rank == 0)
    model = _load(where, ranks)
    budgets, cores = _choices(what, model.config.num_cores)
    settings = _settings(where, model, budgets, sizes, cores)
    about = Path(where.model).name if Path(where.model).is_dir() else where.model

    def look(photo: Photo) -> dict[str, Any]:
        from selectivit.cli.core_look import look_at

        digest = file_digest(photo.path)
        entry = kept_entry(photo, out, settings, digest)
        if entry is not None:
            return entry
        return save_look(photo, out, settings, digest, look_at(model, photo.path, budgets, sizes), cores, about)

    share = ranks.share(photos)
    with progress("photos", len(share), shown=ranks.rank == 0) as tell:
        work_through(
            lambda: each_photo(share, look, outcome, tell, "look at"),
            out / INDEX,
            settings,
            outcome,
            photos,
            FILES,
            ranks,
        )
    return finish(out / INDEX, settings, outcome, photos, FILES, ranks)


def _load(where: RunOptions, ranks: Ranks) -> Veca:
    import torch

    from selectivit.models.veca import Veca
    from selectivit.models.weights import load_model

    torch.manual_seed(where.seed)
    model = load_model(where.model, device=str(pick_device(where.device, ranks.local_rank)))
    if not isinstance(model, Veca):
        raise ValueError(
            f"{where.model} is a {type(model).__name__} without cores: expected a core-periphery model (VECA); "
            "`selectivit compare` shows the attention of others"
        )
    return model


def _choices(what: CoreOptions, num_cores: int) -> tuple[list[int], list[int] | None]:
    """The budgets, and the cores to draw."""
    default = sorted({budget for budget in (1, 4, 16, num_cores) if budget <= num_cores})
    budgets = default if what.budgets is None else parse_numbers("--budgets 1,4,16", what.budgets)
    if budgets[0] < 1 or budgets[-1] > num_cores:
        raise ValueError(f"expected --budgets of 1 to {num_cores} cores, got {what.budgets!r}")
    cores = None if what.cores is None else parse_numbers("--cores 0,3,7", what.cores)
    if cores is not None and not 0 <= cores[0] <= cores[-1] < budgets[-1]:
        raise ValueError(f"expected --cores of 0 to {budgets[-1] - 1}, those of the largest budget, got {what.cores!r}")
    return budgets, cores


def _settings(
    where: RunOptions, model: Veca, budgets: list[int], sizes: list[int], cores: list[int] | None
) -> dict[str, Any]:
    """Gather all that the results depend on beside the photo: where any of it differs, they are computed anew."""
    from selectivit import __version__

    return {
        "selectivit": __version__,
        "model": where.model,
        "weights_sha256": tensors_digest(model.state_dict()),
        "budgets": budgets,
        "sizes": sizes,
        "cores": cores,
    }
