"""The files of one photo's look at its cores: four pictures, and the numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli import records
from selectivit.cli.jobs import Photo
from selectivit.data.writing import write_atomic, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from selectivit.cli.core_look import CoreLook

FILES = ("record", "budgets", "attention", "paths", "listening")
"""The keys of an entry that name its files."""


def targets(photo: Photo, out: Path) -> list[Path]:
    """Name the files that a photo's results go to.

    Args:
        photo: the photo.
        out: the job's folder.

    Returns:
        The record, then the pictures.

    Example:
        >>> [p.name for p in targets(Photo(Path("a/b.jpg"), "b"), Path("out"))][:2]
        ['b.cores.json', 'b.budgets.png']
    """
    return [out / f"{photo.name}.{end}" for end in ("cores.json", *(f"{name}.png" for name in FILES[1:]))]


def kept_entry(photo: Photo, out: Path, settings: dict[str, Any], digest: str) -> dict[str, Any] | None:
    """Look for a photo's results of an earlier run; see `records.kept_entry`."""
    return records.kept_entry(photo, targets(photo, out), settings, digest)


def holds_another(photo: Photo, out: Path) -> bool:
    """Tell whether the photo's outputs would replace another photo's; see `records.record_of_another`."""
    return records.record_of_another(photo, targets(photo, out)[0])


def save_look(
    photo: Photo, out: Path, settings: dict[str, Any], digest: str, look: CoreLook, cores: list[int] | None, about: str
) -> dict[str, Any]:
    """Write a photo's files, each atomically; the record last, since it says that all are there.

    Args:
        photo: the photo.
        out: the job's folder.
        settings: of this run.
        digest: the photo's `file_digest`.
        look: what was seen.
        cores: whose attention is drawn; None is the image's own and the five that most patches listen to.
        about: the model's name, for the titles.

    Returns:
        The photo's entry for cores.json.

    Raises:
        WriteError: no space, no permission.
    """
    record, *pictures = targets(photo, out)
    chosen = _listened_to(look) if cores is None else cores
    for path, picture in zip(pictures, _pictures(look, chosen, f"{about}, {photo.path.name}"), strict=True):
        write_atomic(path, picture)
    entry: dict[str, Any] = {"source": str(photo.path)}
    entry |= {key: path.relative_to(out).as_posix() for key, path in zip(FILES, (record, *pictures), strict=True)}
    entry |= {"notes": list(look.notes)}
    write_json(record, {"entry": entry, "settings": settings, "source_sha256": digest, **numbers(look, chosen)})
    return {**entry, "state": "written"}


def numbers(look: CoreLook, drawn: list[int]) -> dict[str, Any]:
    """Put what was seen in numbers.

    Args:
        look: what was seen.
        drawn: the cores whose attention is drawn.

    Returns:
        For each size and budget how near its features come to those of the largest budget; for each budget, layer and
        core its place, its distance from the start and the share of patches that listen to it most; of the largest
        budget, for each layer and core, the statistics of its attention, and their means over cores. null is what has
        no value: a core that takes from one patch alone has no two patches to compare.
    """
    from dataclasses import fields

    from selectivit.vis.core_listeners import listener_shares
    from selectivit.vis.core_paths import core_moves
    from selectivit.vis.statistics import mean_cosine

    most = max(look.budgets)
    names = [field.name for field in fields(look.statistics)]
    found = {name: getattr(look.statistics, name) for name in names}
    return {
        "maps": [
            {
                "size": size,
                "grid": list(features.shape[1:]),
                "num_cores": budget,
                "cosine_to_largest_budget": mean_cosine([features, look.maps[size, most]])[0],
            }
            for (size, budget), features in look.maps.items()
        ],
        "size": look.size,
        "grid": list(look.attention.shape[2:]),
        "budgets": [
            {
                "num_cores": budget,
                "core_coords": _listed(seen.coords),
                "moved": _listed(core_moves(seen.coords)),
                "listener_shares": _listed(listener_shares(seen.winners, budget)),
            }
            for budget, seen in look.budgets.items()
        ],
        "attention": {
            "num_cores": most,
            "drawn": drawn,
            "mean": {name: _listed(values.nanmean(1)) for name, values in found.items()},
            **{name: _listed(values) for name, values in found.items()},
        },
    }


def _listened_to(look: CoreLook, count: int = 6) -> list[int]:
    """Core 0, the image's own, and those that most patches listen to in the last layer."""
    from selectivit.vis.core_listeners import listener_shares

    most = max(look.budgets)
    shares = listener_shares(look.budgets[most].winners[-1], most)
    order = [core for core in shares.argsort(descending=True, stable=True).tolist() if core != 0]
    return [0, *sorted(order[: count - 1])]


def _pictures(look: CoreLook, cores: list[int], title: str) -> list[bytes]:
    from selectivit.vis.budget_maps import budget_maps_figure
    from selectivit.vis.compare import to_png
    from selectivit.vis.core_attention import core_attention_figure
    from selectivit.vis.core_listeners import core_listeners_figure
    from selectivit.vis.core_paths import core_paths_figure

    most, size = max(look.budgets), f"{look.size} px"
    coords = {budget: seen.coords for budget, seen in look.budgets.items()}
    winners = {budget: seen.winners for budget, seen in look.budgets.items() if budget > 1} or {
        most: look.budgets[most].winners
    }
    depth = len(coords[most])
    titled = f"{title}, {size}, {most} cores"
    figures = [
        budget_maps_figure(look.shown, look.maps, title=title),
        core_attention_figure(
            look.shown, look.attention, coords[most], cores, _spread(depth, 6), look.statistics, title=titled
        ),
        core_paths_figure(look.shown, coords[most], title=titled),
        core_listeners_figure(look.shown, winners, coords, _spread(depth, 4), title=f"{title}, {size}"),
    ]
    return [to_png(figure) for figure in figures]


def _spread(depth: int, count: int) -> list[int]:
    """Layers to draw: the first, the last, and others evenly between."""
    if depth <= count:
        return list(range(depth))
    return [round(i * (depth - 1) / (count - 1)) for i in range(count)]


def _listed(values: Tensor) -> Any:
    """A tensor as lists, to six digits; NaN as None."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(part) for part in value]
        return None if math.isnan(value) else float(f"{value:.6g}")

    return plain(values.tolist())
