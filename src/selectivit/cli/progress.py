"""Progress on stderr: a bar for people, plain lines for files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(title: str, total: int, *, shown: bool = True) -> Iterator[Callable[[str | None], None]]:
    """Count up to a total on stderr, with lines in between; the bar shows on a terminal only.

    Args:
        title: what is counted.
        total: how many there will be.
        shown: False for no bar even on a terminal.

    Returns:
        A context manager that yields a function: called after each item, with a line to print or None.

    Example:
        >>> with progress("photos", 2) as tell:
        ...     tell(None)
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and sys.stderr.isatty())) as bar:
        task = bar.add_task(title, total=total)

        def tell(line: str | None) -> None:
            bar.advance(task)
            if line is not None:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield tell


def working(text: str) -> contextlib.AbstractContextManager[object]:
    """Show on a terminal that something slow goes on.

    Args:
        text: what.

    Returns:
        A context manager for as long as it lasts.

    Example:
        >>> with working("counting"):
        ...     pass
    """
    from rich.console import Console

    return Console(stderr=True).status(text) if sys.stderr.isatty() else contextlib.nullcontext()
