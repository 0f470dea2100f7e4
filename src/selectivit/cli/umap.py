"""Lay the patch features of several photos out in the plane by UMAP: umap.png and umap.json.

Points that lie together have like features: one thing in several photos should be one cloud. Photos that cannot be read
are named and skipped. Needs umap-learn: pip install 'selectivit[umap]'.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.jobs import Outcome, Photo, each_photo, find_photos
from selectivit.cli.options import RunOptions, add_options, option, pick_device, take
from selectivit.cli.progress import progress, working
from selectivit.data.writing import check_writable, write_atomic, write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

HELP = "lay patch features of photos out in the plane by UMAP: a picture and the points"


@dataclass(frozen=True)
class UmapOptions:
    """What is laid out, and how."""

    size: int | None = option(
        None, "PX", "the photos' shorter side in pixels, then rounded to whole patches; default: the model's own size"
    )
    num_cores: int | None = option(None, "N", "cores that a core-periphery model (VECA) is to use; default: all")
    photos: int = option(12, "N", "photos that are taken at most, the first ones: more colours could not be told apart")
    points: int = option(4000, "N", "patches that are taken at most, of each photo as many, drawn at random")
    neighbours: int = option(30, "N", "neighbours that a patch is held to: few show detail, many the whole")
    min_dist: float = option(0.3, "D", "how near to each other points may come, 0 to 1")


@dataclass(frozen=True)
class Drawn:
    """Patches that were drawn from one photo.

    Args:
        photo: which one.
        shown: as the model saw it, (H, W, 3) in 0..1.
        grid: rows and columns of all its patches.
        places: row and column of those drawn, (P, 2).
        features: of those drawn, (P, C).
    """

    photo: Photo
    shown: Tensor
    grid: tuple[int, int]
    places: Tensor
    features: Tensor


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("paths", nargs="+", type=str, help="photos, and folders that are searched for photos")
    add_options(parser, RunOptions)
    add_options(parser, UmapOptions)


def run(options: Namespace) -> int:
    """Compute, lay out, draw and write.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 photos were skipped, 2 nothing could be done.

    Raises:
        ValueError: no photos, an unknown model, numbers that cannot be.
        ImportError: umap-learn is missing.
        WriteError: the folder cannot be written to.
    """
    where, what, out = take(RunOptions, options), take(UmapOptions, options), Path(options.out)
    for name, value in (("--photos", what.photos), ("--points", what.points)):
        if value < 1:
            raise ValueError(f"expected {name} of 1 or more, got {value}")
    check_writable(out)

    import torch

    from selectivit.models.weights import load_model
    from selectivit.vis.umap import require_umap

    outcome = Outcome()
    found = find_photos(options.paths, outcome, lambda photo: False, first=True)
    require_umap()  # what is missing is told before the work
    torch.manual_seed(where.seed)
    model = load_model(where.model, device=str(pick_device(where.device)))
    taken = found[: what.photos]
    if len(found) > len(taken):
        print(f"note: the first {len(taken)} of {len(found)} photos are taken; --photos takes more", file=sys.stderr)
    drawn = _draw_all(taken, model, where, what, outcome)
    return _finish(drawn, where, what, out, outcome)


def _draw_all(
    photos: list[Photo], model: nn.Module, where: RunOptions, what: UmapOptions, outcome: Outcome
) -> list[Drawn]:
    import torch

    drawn: list[Drawn] = []
    generator = torch.Generator().manual_seed(where.seed)
    most = max(1, what.points // len(photos))

    def work(photo: Photo) -> dict[str, Any]:
        drawn.append(_draw(photo, model, what, most, generator))
        return {"source": str(photo.path)}

    with progress("photos", len(photos)) as tell:
        each_photo(photos, work, outcome, tell, "compute")
    return drawn


def _draw(photo: Photo, model: nn.Module, what: UmapOptions, most: int, generator: torch.Generator) -> Drawn:
    import torch

    from selectivit.cli.reading import ready_photo
    from selectivit.features import features

    ready = ready_photo(photo.path, model, what.size)
    with torch.inference_mode():
        found = features(model, ready.image[None].to(next(model.parameters()).device), num_cores=what.num_cores)
    h, w = found.grid
    chosen = torch.randperm(h * w, generator=generator)[:most].sort().values
    places = torch.stack([chosen // w, chosen % w], -1)
    return Drawn(photo, ready.shown, (h, w), places, found.patch_tokens[0].float().cpu()[chosen])


def _finish(drawn: list[Drawn], where: RunOptions, what: UmapOptions, out: Path, outcome: Outcome) -> int:
    import torch

    from selectivit.vis.compare import to_png
    from selectivit.vis.umap import PhotoPatches, umap_figure, umap_points

    if not drawn:
        print("no photo could be read", file=sys.stderr)
        return 2
    with working("laying out patches"):
        features = torch.cat([one.features for one in drawn])
        points = umap_points(features, neighbours=what.neighbours, min_dist=what.min_dist, seed=where.seed)
    parts = points.split([len(one.features) for one in drawn])
    laid = [
        PhotoPatches(one.photo.path.name, one.shown, one.grid, one.places, part)
        for one, part in zip(drawn, parts, strict=True)
    ]
    name = Path(where.model).name if Path(where.model).is_dir() else where.model
    write_atomic(out / "umap.png", to_png(umap_figure(laid, title=f"UMAP of patch features, {name}")))
    entries = [
        {
            "source": str(one.photo.path),
            "grid": list(one.grid),
            "patches": one.places.tolist(),
            "points": [[round(value, 4) for value in point] for point in part.tolist()],
        }
        for one, part in zip(drawn, parts, strict=True)
    ]
    content = {"settings": {**asdict(where), **asdict(what)}, "photos": entries, "skipped": outcome.skipped}
    write_json(out / "umap.json", content)
    print(f"{len(features)} patches of {len(drawn)} photos", out / "umap.png", out / "umap.json", sep="\n")
    return 1 if outcome.skipped else 0
