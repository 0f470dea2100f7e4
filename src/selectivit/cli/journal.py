"""Results of long work, noted one by one, so that a run that was stopped, or is asked for again, has them already."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from selectivit.cli.ranks import Ranks
from selectivit.data.digest import settings_digest
from selectivit.data.writing import write_error


def key_of(*parts: Any) -> str:
    """Name a result by all that it depends on.

    Args:
        parts: what json can hold.

    Returns:
        A digest, 24 hexadecimal digits.

    Example:
        >>> key_of("photo", {"size": 224}) == key_of("photo", {"size": 448})
        False
    """
    return settings_digest(parts)[:24]


class Journal:
    """Results by key, in a folder with a file for each process.

    A result is a line, written and flushed when it is known: what ends the work leaves all lines but perhaps the last.

    Args:
        folder: made if it is not there.
        ranks: the processes; all know what any of them noted in earlier runs.

    Raises:
        WriteError: the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Journal(folder, Ranks()) as journal:
        ...     journal.add("a", [1, 2])
        >>> with Journal(folder, Ranks()) as journal:
        ...     journal.get("a")
        [1, 2]
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._path = folder / f"{ranks.rank}.jsonl"
        # The first process reads for all: they must agree on what is left, while none writes yet.
        self._known: dict[str, Any] = ranks.gather(_read(folder) if ranks.rank == 0 else {})[0]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8")
            self._file.write("\n")  # behind a line that was cut off
            self._file.flush()
        except OSError as error:
            raise write_error(self._path, error) from error

    def get(self, key: str) -> Any:
        """The result of a key; None where there is none yet."""
        return self._known.get(key)

    def add(self, key: str, value: Any) -> None:
        """Note a result.

        Args:
            key: from `key_of`.
            value: what json can hold, not None.

        Raises:
            WriteError: no space.
        """
        try:
            self._file.write(json.dumps([key, value], separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise write_error(self._path, error) from error
        self._known[key] = value

    def close(self) -> None:
        """Close the file; what was noted stays."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # an empty line, or one that was cut off
                key, value = json.loads(line)
                found[key] = value
    return found
