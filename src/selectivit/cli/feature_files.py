"""The files of one photo: its features as safetensors, and their PCA picture."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli.jobs import Photo, is_others
from selectivit.cli.reading import ReadyPhoto
from selectivit.data.writing import write_atomic

if TYPE_CHECKING:
    from torch import Tensor


def targets(photo: Photo, out: Path) -> tuple[Path, Path]:
    """Name the files that a photo's results go to.

    Args:
        photo: the photo.
        out: the job's folder.

    Returns:
        The features and the picture.

    Example:
        >>> from selectivit.cli.jobs import Photo, is_others
        >>> [p.as_posix() for p in targets(Photo(Path("a/b.jpg"), "b"), Path("out"))]
        ['out/b.safetensors', 'out/b.pca.png']
    """
    # Never the photo's own name: a job may well write into the folder that it reads.
    return out / f"{photo.name}.safetensors", out / f"{photo.name}.pca.png"


def kept_record(photo: Photo, out: Path, settings: dict[str, Any], digest: str) -> dict[str, Any] | None:
    """Look for a photo's results of an earlier run with the same settings and the same photo.

    Args:
        photo: the photo.
        out: the job's folder.
        settings: of this run.
        digest: the photo's `file_digest`.

    Returns:
        The photo's entry for features.json; None if it must be computed.
    """
    from safetensors import SafetensorError, safe_open

    features, picture = targets(photo, out)
    if not (features.is_file() and picture.is_file()):
        return None
    try:
        with safe_open(features, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):  # not ours, or damaged: computed anew
        return None
    if metadata.get("settings") != _stable_json(settings) or metadata.get("source_sha256") != digest:
        return None
    return {**json.loads(metadata["record"]), "source": str(photo.path), "state": "kept"}


def holds_another(photo: Photo, out: Path) -> bool:
    """Tell whether the photo's outputs would replace those of another photo, of another path and another content.

    Args:
        photo: the photo.
        out: the job's folder.

    Returns:
        False where there is nothing, or what the same photo left, be it edited or moved since.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(targets(photo, out)[0], framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):  # nothing there, or not ours
        return False
    return "source" in metadata and is_others(photo, metadata["source"], metadata.get("source_sha256"))


def save_photo(
    photo: Photo,
    out: Path,
    settings: dict[str, Any],
    digest: str,
    tensors: dict[str, Tensor],
    ready: ReadyPhoto,
) -> dict[str, Any]:
    """Write a photo's features and picture, each atomically; the features last, since they say that both are there.

    Args:
        photo: the photo.
        out: the job's folder.
        settings: of this run.
        digest: the photo's `file_digest`.
        tensors: what the safetensors file holds; "map" is (C, h, w).
        ready: the photo as the model saw it.

    Returns:
        The photo's entry for features.json.

    Raises:
        WriteError: no space, no permission.
    """
    import safetensors.torch

    features, picture = targets(photo, out)
    record = {
        "source": str(photo.path),
        "features": features.relative_to(out).as_posix(),
        "picture": picture.relative_to(out).as_posix(),
        "image_size": list(ready.shown.shape[:2]),
        "grid": list(tensors["map"].shape[1:]),
        "notes": list(ready.notes),
    }
    metadata = {
        "format": "pt",
        "settings": _stable_json(settings),
        "source": str(photo.path),
        "source_sha256": digest,
        "record": _stable_json(record),
    }
    write_atomic(picture, _picture(ready.shown, tensors["map"]))
    # As bytes and then to the disk ourselves, so that a full disk is an OSError and leaves no half file.
    write_atomic(features, safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()}, metadata))
    return {**record, "state": "written"}


def _picture(shown: Tensor, features: Tensor) -> bytes:
    """Render the photo beside its features' PCA, which covers it patch by patch."""
    import torch
    from PIL import Image

    from selectivit.vis.pca import pca_maps

    colours = pca_maps([features])[0][0]  # (h, w, 3)
    size = (shown.shape[0], shown.shape[1])
    large = torch.nn.functional.interpolate(colours.permute(2, 0, 1)[None], size=size, mode="nearest-exact")[0]
    both = torch.cat([shown, torch.ones(size[0], 8, 3), large.permute(1, 2, 0)], dim=1).clamp(0, 1)
    buffer = io.BytesIO()
    Image.fromarray((both * 255).round().to(torch.uint8).numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def _stable_json(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, ensure_ascii=False)
