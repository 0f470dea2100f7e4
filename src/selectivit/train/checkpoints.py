"""Lightning's checkpoints, each there whole or not at all, read without running code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from selectivit.data.writing import open_atomic, write_error

CHECKPOINT = "checkpoint.ckpt"


class WholeCheckpoints(CheckpointIO):
    """Writes a checkpoint beside the last one and puts it in its place only when it is on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: what Lightning gathered.
            path: of the file.
            storage_options: none are known.

        Raises:
            WriteError: no space, no permission; the last checkpoint is as it was.
        """
        target = Path(path)
        try:
            with open_atomic(target) as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:  # torch's archive writer turns the system's errors into its own
            cause = error.__cause__ or error.__context__
            reason = cause if isinstance(cause, OSError) else OSError(str(error).splitlines()[0])
            raise write_error(target, reason) from error

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; tensors and plain values alone, whatever is asked.

        Args:
            path: of the file.
            map_location: where tensors go; the CPU if it is not said.
            weights_only: not heeded: it is always so.

        Returns:
            What was saved.

        Raises:
            ValueError: a damaged file.
        """
        try:
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:  # zip's, pickle's and torch's own
            raise ValueError(
                f"{path} cannot be read ({str(error).splitlines()[0]}): delete it to start this run from its beginning"
            ) from error

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


def earlier_checkpoint(out: Path) -> Path | None:
    """The checkpoint in a run's folder, or None.

    Args:
        out: the folder.

    Returns:
        Its path.

    Example:
        >>> earlier_checkpoint(Path("no such folder"))
    """
    path = out / CHECKPOINT
    return path if path.is_file() else None


def steps_done(checkpoint: Path | None) -> int:
    """How many steps a checkpoint has behind it.

    Args:
        checkpoint: its file; None where there is none.

    Returns:
        The number.

    Example:
        >>> steps_done(None)
        0
    """
    if checkpoint is None:
        return 0
    return int(WholeCheckpoints().load_checkpoint(checkpoint, map_location=torch.device("meta"))["global_step"])
