"""Memory that runs out, however it is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WORDS = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed", "bad_alloc")
ADVICE = "choose a smaller --size, a smaller --batch-size where there is one, or --device cpu"


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out: torch's allocators mostly raise a RuntimeError.

    Args:
        error: any.

    Returns:
        True if so.

    Example:
        >>> text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 281474976710656 bytes."
        >>> out_of_memory(RuntimeError(text)), out_of_memory(MemoryError()), out_of_memory(RuntimeError("shape"))
        (True, True, False)
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


def within_memory(work: Callable[[], T]) -> T | None:
    """Do something that memory may not suffice for.

    Args:
        work: what to do; it gives no None.

    Returns:
        What it gives; None where memory ran out, and then what it held is free again.

    Example:
        >>> within_memory(lambda: 3)
        3
    """
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
    torch = sys.modules.get("torch")  # only now, when the error no longer holds the tensors
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None
