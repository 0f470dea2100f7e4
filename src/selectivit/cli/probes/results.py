"""What probes have found: one JSON a kind, to which every run with other settings is added."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selectivit.data.writing import write_json


class Results:
    """The runs of one kind in a folder.

    Args:
        path: the JSON file; it need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path

    def runs(self) -> list[dict[str, Any]]:
        """All runs, in the order in which they were first made; none, and a note, where the file cannot be read."""
        if not self.path.is_file():
            return []
        with contextlib.suppress(ValueError, KeyError, TypeError):
            runs = json.loads(self.path.read_text(encoding="utf-8"))["runs"]
            if all(isinstance(run["settings"], dict) and isinstance(run["result"], dict) for run in runs):
                return runs
        print(f"note: {self.path} could not be read: earlier results are not kept", file=sys.stderr)
        return []

    def get(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """The run of these very settings; None where there is none.

        A run that had to skip something is made anew, since what was missing may be there now.
        """
        wanted = json.loads(json.dumps(settings))
        found = next((run for run in self.runs() if run["settings"] == wanted), None)
        return None if found is None or found.get("skipped") else found

    def get_or_make(self, settings: dict[str, Any], make: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """The run of these settings, made if it is not there.

        Args:
            settings: all that decides the result.
            make: gives the run's other entries, "result" among them.

        Returns:
            The run, and whether it is an earlier one.
        """
        found = self.get(settings)
        if found is not None:
            return found, True
        return self.put(settings, make()), False

    def put(self, settings: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
        """Add a run, in the place of one of the same settings.

        Args:
            settings: all that decides the result.
            run: its other entries, "result" among them.

        Returns:
            The run with its settings.

        Raises:
            WriteError: the file cannot be written.
        """
        whole, wanted = {"settings": settings, **run}, json.loads(json.dumps(settings))
        runs = self.runs()
        place = next((i for i, other in enumerate(runs) if other["settings"] == wanted), len(runs))
        write_json(self.path, {"runs": [*runs[:place], whole, *runs[place + 1 :]]})
        return whole
