"""What was measured photo by photo, kept so that a stopped run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from selectivit.cli.ranks import Ranks
from selectivit.data.writing import write_json

EVERY = 64
"""Photos after which the file is written anew: what is lost at most when the process is killed."""


class Kept:
    """Records by photo of one setting, in a file a process; leaving the `with` block writes it, whatever happened.

    Args:
        folder: of the files.
        settings: all that the records depend on beside the photo: of other settings nothing is taken.
        ranks: the processes; each reads the files of all and writes its own.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Kept(folder, {"model": "a"}) as kept:
        ...     kept.put("photo", {"norm": 2.0})
        >>> Kept(folder, {"model": "a"}).get("photo"), Kept(folder, {"model": "b"}).get("photo")
        ({'norm': 2.0}, None)
    """

    def __init__(self, folder: Path, settings: dict[str, Any], ranks: Ranks | None = None):
        self.settings = json.loads(json.dumps(settings, sort_keys=True))
        name = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{name}.{0 if ranks is None else ranks.rank}.json"
        self._known: dict[str, Any] = {}
        for path in sorted(folder.glob(f"{name}.*.json")):
            self._known |= self._read(path)
        self._mine = self._read(self.path)
        self._unwritten = 0

    def get(self, key: str) -> Any | None:
        """The record of a photo, or None."""
        return self._known.get(key)

    def put(self, key: str, record: Any) -> None:
        """Keep a record.

        Args:
            key: names the photo.
            record: what JSON can hold.

        Raises:
            WriteError: the file cannot be written.
        """
        self._known[key] = self._mine[key] = record
        self._unwritten += 1
        if self._unwritten >= EVERY:
            self.write()

    def write(self) -> None:
        """Write this process's file.

        Raises:
            WriteError: it cannot be written.
        """
        if self._unwritten:
            write_json(self.path, {"settings": self.settings, "records": self._mine})
            self._unwritten = 0

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.write()

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return dict(content["records"]) if content["settings"] == self.settings else {}
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: measured anew
            return {}
