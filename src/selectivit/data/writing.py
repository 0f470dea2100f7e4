"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ADVICE = {
    errno.ENOSPC: "free some space, or choose another --out",
    errno.EDQUOT: "your quota is used up: free some space, or choose another --out",
    errno.EACCES: "choose an --out that you may write to",
    errno.EPERM: "choose an --out that you may write to",
    errno.EROFS: "choose an --out that you may write to",
    errno.ENOTDIR: "choose an --out that is a folder",
    errno.EEXIST: "choose an --out that is a folder",
}


class WriteError(OSError):
    """A result could not be written; nothing partial is left of it."""


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write that others see whole or not at all, whatever happens on the way.

    Args:
        path: the file; its folders are made.

    Returns:
        A context manager that yields the file; leaving it without an error puts it in its place.

    Raises:
        WriteError: no space, no permission, a file where a folder should be.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.bin"
        >>> with open_atomic(target) as file:
        ...     there = (file.write(b"abc"), target.exists())
        >>> there, target.read_bytes()
        ((3, False), b'abc')
    """
    # In the same folder, since a rename is atomic within a file system only; with the process's number, since ranks
    # may share the folder.
    part = path.with_name(f".{path.name[:100]}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a full disk may show only here
        os.replace(part, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def write_error(path: Path, error: OSError) -> WriteError:
    """Say what could not be written, why, and what to do.

    Args:
        path: of the file or folder.
        error: the system's.

    Returns:
        The error, to be raised.
    """
    reason = error.strerror or str(error)
    advice = ADVICE.get(error.errno or 0, "choose another --out")
    return WriteError(f"cannot write {path}: {reason}; {advice}")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that others see all of it or none, whatever happens on the way.

    Args:
        path: the file; its folders are made.
        data: what it will hold.

    Raises:
        WriteError: no space, no permission, a file where a folder should be.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "sub" / "a.bin"
        >>> write_atomic(target, b"abc")
        >>> target.read_bytes()
        b'abc'
    """
    with open_atomic(path) as file:
        file.write(data)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, for people to read too.

    Args:
        path: the file.
        content: what json can hold.

    Raises:
        WriteError: as `write_atomic`.
        ValueError: NaN or infinity, which JSON does not know.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    # Lists of numbers on one line. A bracket before a line break is never part of a string: there it would be \\n.
    text = re.sub(r"\[\n[^\[\]{}\"]*\]", lambda found: json.dumps(json.loads(found[0])), text)
    write_atomic(path, (text + "\n").encode())


def check_writable(folder: Path) -> None:
    """Find out before the work starts whether a folder takes files.

    Args:
        folder: made if it is not there.

    Raises:
        WriteError: it cannot be made or written to.
    """
    probe = folder / ".selectivit"
    write_atomic(probe, b"")
    probe.unlink(missing_ok=True)
