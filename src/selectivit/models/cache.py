"""The folder where fetched weights are kept: where it is, and how a file gets into it whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_TIMEOUT_S = 3600.0
_SCRATCH = ".fetching-"


class WeightsError(OSError):
    """Weights that are not there, cannot be fetched, or are not what they should be; the text says what to do."""


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder for fetched weights; it need not exist yet.

    Args:
        cache_dir: this folder, if given; else $SELECTIVIT_CACHE, $XDG_CACHE_HOME/selectivit or ~/.cache/selectivit.

    Returns:
        The folder's absolute path.

    Example:
        >>> cache_folder("weights").name
        'weights'
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    if own := os.environ.get("SELECTIVIT_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "selectivit"


@contextmanager
def only_one_process(target: Path) -> Iterator[Path]:
    """Hold the right to make `target`, and a scratch folder beside it that is gone afterwards, whatever happens.

    Other processes wait, then find the file made. What is finished leaves the scratch folder by `move_into_place`.

    Args:
        target: the file to be made.

    Yields:
        The scratch folder, on the same file system as `target`.

    Raises:
        WeightsError: the folder cannot be made or written, the disk is full, or another process is at it for too long.
    """
    from filelock import FileLock, Timeout

    with _explained(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{target}.lock", timeout=LOCK_TIMEOUT_S):
                _sweep(target.parent)
                with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target.parent) as scratch:
                    yield Path(scratch)
        except Timeout:
            raise WeightsError(
                f"another process has been making {target} for {LOCK_TIMEOUT_S / 60:.0f} minutes; "
                f"if none is running, delete {target}.lock and try again"
            ) from None


def move_into_place(finished: Path, target: Path) -> None:
    """Give a finished file its name, in one step and safe against a power cut.

    Args:
        finished: a complete file on the same file system.
        target: its name from now on; what had that name is replaced.
    """
    with finished.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(finished, target)
    if os.name == "posix":  # the new name itself reaches the disk with its folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sweep(folder: Path) -> None:
    """Remove what a killed process left: whoever holds the lock is alone here."""
    import shutil

    for left in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    elsewhere = "set SELECTIVIT_CACHE to a folder elsewhere"
    try:
        yield
    except WeightsError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"no space left for the weights in {folder}: free about 300 MB there, or {elsewhere}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"cannot write the weights to {folder}: allow writing there, or {elsewhere} that can be written"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            text = f"cannot keep weights in {folder}: a file is in the way; {elsewhere}"
        else:
            text = f"cannot keep weights in {folder} ({error}); {elsewhere}"
        raise WeightsError(text) from error
