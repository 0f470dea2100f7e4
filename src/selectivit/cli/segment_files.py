"""The files of one photo's segmentation: the overlay, the index picture, and the classes in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli import records
from selectivit.cli.jobs import Photo
from selectivit.data.writing import write_atomic, write_json

if TYPE_CHECKING:
    from PIL import Image

    from selectivit.openvocab.segmenter import Segmentation

FILES = ("record", "overlay", "index_map")
"""The keys of an entry that name its files."""


def targets(photo: Photo, out: Path) -> tuple[Path, Path, Path]:
    """Name the files that a photo's results go to.

    Args:
        photo: the photo.
        out: the job's folder.

    Returns:
        The record, the overlay and the index picture.

    Example:
        >>> [p.name for p in targets(Photo(Path("a/b.jpg"), "b"), Path("out"))]
        ['b.segment.json', 'b.segment.png', 'b.index.png']
    """
    return out / f"{photo.name}.segment.json", out / f"{photo.name}.segment.png", out / f"{photo.name}.index.png"


def kept_entry(photo: Photo, out: Path, settings: dict[str, Any], digest: str) -> dict[str, Any] | None:
    """Look for a photo's results of an earlier run with the same settings and the same photo.

    Args:
        photo: the photo.
        out: the job's folder.
        settings: of this run.
        digest: the photo's `file_digest`.

    Returns:
        The photo's entry for segment.json; None if it must be computed.
    """
    return records.kept_entry(photo, targets(photo, out), settings, digest)


def holds_another(photo: Photo, out: Path) -> bool:
    """Tell whether the photo's outputs would replace those of another photo, of another path and another content.

    Args:
        photo: the photo.
        out: the job's folder.

    Returns:
        False where there is nothing, or what the same photo left, be it edited or moved since.
    """
    return records.record_of_another(photo, targets(photo, out)[0])


def save_segmentation(
    photo: Photo, out: Path, settings: dict[str, Any], digest: str, found: Segmentation, picture: Image.Image
) -> dict[str, Any]:
    """Write a photo's three files, each atomically; the record last, since it says that all are there.

    Args:
        photo: the photo.
        out: the job's folder.
        settings: of this run.
        digest: the photo's `file_digest`.
        found: its segmentation.
        picture: the photo itself.

    Returns:
        The photo's entry for segment.json.

    Raises:
        WriteError: no space, no permission.
    """
    import numpy as np
    import torch

    from selectivit.vis.overlay import index_png, overlay_png, palette

    record, overlay, index_map = targets(photo, out)
    paths = zip(FILES, (record, overlay, index_map), strict=True)
    entry: dict[str, Any] = {"source": str(photo.path)}
    entry |= {key: path.relative_to(out).as_posix() for key, path in paths}
    entry |= {"image_size": list(found.index_map.shape), "classes": classes(found), "notes": list(found.notes)}
    shown = torch.from_numpy(np.array(picture)).float() / 255
    options = {"has_background": found.has_background, "title": photo.path.name}
    write_atomic(overlay, overlay_png(shown, found.index_map, found.names, **options))
    colours = palette(len(found.names), has_background=found.has_background)
    write_atomic(index_map, index_png(found.index_map, colours))
    write_json(record, {"entry": entry, "settings": settings, "source_sha256": digest})
    return {**entry, "state": "written"}


def classes(found: Segmentation) -> list[dict[str, Any]]:
    """Put each class in numbers.

    Args:
        found: a segmentation.

    Returns:
        For each class its index, name, colour (RGB), pixels, share of the picture, and the mean and the largest of its
        probability over the patches; background by threshold has no probability of its own.
    """
    import torch

    from selectivit.vis.overlay import palette

    colours = palette(len(found.names), has_background=found.has_background).tolist()
    pixels = torch.bincount(found.index_map.flatten(), minlength=len(found.names)).tolist()
    whole, rows = found.index_map.numel(), []
    for i, (name, colour) in enumerate(zip(found.names, colours, strict=True)):
        scores = found.scores[i]
        rows.append(
            {
                "index": i,
                "name": name,
                "colour": colour,
                "pixels": pixels[i],
                "share": pixels[i] / whole,
                "mean_score": scores.mean().item(),
                "max_score": scores.max().item(),
            }
        )
    return rows
