"""The JSON file beside a photo's pictures: it says that all are there, and what they were made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selectivit.cli.jobs import Photo, is_others


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a record.

    Args:
        path: the JSON file.

    Returns:
        The record; None where there is none, or one that is not ours or damaged.

    Example:
        >>> read_record(Path("no/such.json")) is None
        True
    """
    try:
        record = json.loads(path.read_text())
    except (ValueError, OSError):
        return None
    return record if isinstance(record, dict) and {"entry", "settings", "source_sha256"} <= record.keys() else None


def kept_entry(photo: Photo, files: Sequence[Path], settings: dict[str, Any], digest: str) -> dict[str, Any] | None:
    """Look for a photo's results of an earlier run with the same settings and the same photo.

    Args:
        photo: the photo.
        files: that its results go to, the record first.
        settings: of this run.
        digest: the photo's `file_digest`.

    Returns:
        The photo's entry for the job's index; None if it must be computed.
    """
    if not all(path.is_file() for path in files):
        return None
    record = read_record(files[0])
    same = json.loads(json.dumps(settings))  # as it was read: tuples are lists
    if record is None or record["settings"] != same or record["source_sha256"] != digest:
        return None
    return {**record["entry"], "source": str(photo.path), "state": "kept"}


def record_of_another(photo: Photo, path: Path) -> bool:
    """Tell whether a record belongs to another photo, of another path and another content.

    Args:
        photo: the photo.
        path: the record's file.

    Returns:
        False where there is nothing, or what the same photo left, be it edited or moved since.
    """
    record = read_record(path)
    return record is not None and is_others(photo, record["entry"].get("source"), record["source_sha256"])
