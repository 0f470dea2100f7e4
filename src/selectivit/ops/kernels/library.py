"""The compiled CPU library: found beside this file, loaded once through ctypes, and which of its kernels is chosen.

The library has a C interface and knows nothing of torch, so that building it needs a C++ compiler alone. It is loaded
after torch and shares torch's OpenMP threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import torch

from .structs import ABI

DECLINED, NO_MEMORY = 1, 2

_from_environment = os.environ.get("SELECTIVIT_CPU_KERNEL")
_inside_using: ContextVar[str | None] = ContextVar("selectivit_cpu_kernel", default=None)
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True  # the OpenMP team stayed behind with the parent; a parallel region would wait for it for ever


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _choice() -> str | None:
    return _inside_using.get() or _from_environment


def status() -> str:
    """Say which compiled kernel serves, or why none does.

    Returns:
        One line for `selectivit doctor`.

    Example:
        >>> with using("off"):
        ...     status()
        'switched off: the pure-PyTorch path serves'
    """
    if _choice() == "off":
        return "switched off: the pure-PyTorch path serves"
    library, why = _load()
    if library is None:
        return f"none ({why}): the pure-PyTorch path serves"
    threads = "threads shared with torch" if library.selectivit_has_threads() else "one thread: built without OpenMP"
    which, screen = _chosen(_choice())
    return f"{names()[which]}{' without the 16-bit screen' if not screen else ''}, {threads}"


def available() -> bool:
    """Whether a compiled library is loaded and not switched off."""
    return _choice() != "off" and _load()[0] is not None


@functools.cache
def names() -> tuple[str, ...]:
    """The kernels this processor can run, fastest first; empty without a library."""
    library = _load()[0]
    if library is None:
        return ()
    return tuple(library.selectivit_kernel_name(i).decode() for i in range(library.selectivit_kernels()))


@contextlib.contextmanager
def using(kernel: str) -> Iterator[None]:
    """Choose the CPU kernel inside the block, for tests and measurements; also $SELECTIVIT_CPU_KERNEL.

    Args:
        kernel: "off" for pure PyTorch, or a name out of `names()`; with " float32" behind it, no 16-bit screen.

    Yields:
        Nothing.

    Raises:
        ValueError: no such kernel on this machine.
    """
    if kernel != "off" and kernel.removesuffix(" float32") not in names():
        raise ValueError(f"no CPU kernel {kernel!r} here: use 'off' or one of {', '.join(names()) or 'none'}")
    token = _inside_using.set(kernel)
    try:
        yield
    finally:
        _inside_using.reset(token)


def resolved() -> tuple[ctypes.CDLL, int, bool]:
    """The library, the number of the chosen kernel, and whether it may screen scores in 16 bits.

    Raises:
        RuntimeError: there is no library.
        ValueError: $SELECTIVIT_CPU_KERNEL names no kernel of this machine.
    """
    library, why = _load()
    if library is None:
        raise RuntimeError(f"no compiled CPU kernel: {why}")
    return library, *_chosen(_choice())


def threads() -> int:
    """As many as torch's; one in a forked child."""
    return 1 if _forked else torch.get_num_threads()


def done(code: int) -> bool:
    """Whether the library did what it was asked; False where it declined.

    Raises:
        MemoryError: it had no memory for its tiles.
    """
    if code == NO_MEMORY:
        raise MemoryError("entmax's CPU kernel could not allocate its tiles; use fewer threads or shorter sequences")
    return code != DECLINED


@functools.cache
def _chosen(choice: str | None) -> tuple[int, bool]:
    if not choice:
        return 0, True
    kernel = choice.removesuffix(" float32")
    if kernel not in names():
        raise ValueError(f"SELECTIVIT_CPU_KERNEL is {choice!r}: use 'off' or one of {', '.join(names())}")
    return names().index(kernel), kernel == choice


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and, where there is none, the reason."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    path = Path(__file__).with_name(f"libselectivit_cpu{suffix}")
    if not path.exists():
        return None, "not built: installed without a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path.name} does not load: {error}"
    if library.selectivit_abi() != ABI:
        return None, f"{path.name} is of another version: install again"
    library.selectivit_kernel_name.restype = ctypes.c_char_p
    library.selectivit_saved_bytes.restype = ctypes.c_int64
    library.selectivit_saved_bytes.argtypes = [ctypes.c_int64] * 3
    for name in ("selectivit_forward", "selectivit_entmax_rows"):
        getattr(library, name).argtypes = [ctypes.c_char_p, ctypes.c_int32]
    library.selectivit_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32]
    return library, ""
