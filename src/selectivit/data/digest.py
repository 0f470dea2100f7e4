"""Weights, files and lists of names, known again by their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def tensors_digest(tensors: Mapping[str, Any]) -> str:
    """Identify weights by their values, since a name or a folder may come to hold other ones.

    Args:
        tensors: such as a state dict; what is no tensor in it is passed over.

    Returns:
        A SHA-256 in hexadecimal digits.

    Example:
        >>> tensors_digest({})[:8]
        'e3b0c442'
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def settings_digest(settings: Any) -> str:
    """Identify settings, in whatever order they are named.

    Args:
        settings: what JSON can hold.

    Returns:
        A SHA-256 in hexadecimal digits.

    Example:
        >>> settings_digest({"a": 1, "b": 2}) == settings_digest({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def names_digest(names: Iterable[str]) -> str:
    """Identify a list of names in its order.

    Args:
        names: such as those of photos.

    Returns:
        A SHA-256 in hexadecimal digits.

    Example:
        >>> names_digest(["ab", "c"]) == names_digest(["a", "bc"])
        False
    """
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Identify a file by its content.

    Args:
        path: the file.

    Returns:
        Its SHA-256 in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stat_digest(paths: Iterable[Path], root: Path) -> str:
    """Identify files without reading them: by their places below a folder, sizes and times of change.

    Args:
        paths: in their order.
        root: the folder; it may be moved as a whole.

    Returns:
        A SHA-256 in hexadecimal digits. A copy that does not keep the times has another one.

    Raises:
        OSError: a file is not there.
    """

    def told() -> Iterator[str]:
        for path in paths:
            stat = path.stat()
            yield f"{os.path.relpath(path, root)} {stat.st_size} {stat.st_mtime_ns}"

    return names_digest(told())
