"""A training's progress on stderr: a bar with images a second for people, a line now and then for files."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectivit.train.keeper import StepReport

LINE_EVERY_S = 30.0


@contextlib.contextmanager
def training_progress(*, shown: bool = True) -> Iterator[Callable[[StepReport], None]]:
    """Show where a training is.

    Args:
        shown: False for nothing at all, in all processes but the first.

    Returns:
        A context manager that yields a function to be called after each step.

    Example:
        >>> with training_progress(shown=False) as tell:
        ...     pass
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not (shown and sys.stderr.isatty())) as bar:
        task = bar.add_task("", total=None)
        last, warned = time.monotonic(), 0

        def tell(report: StepReport) -> None:
            nonlocal last, warned
            if not shown:
                return
            for warning in report.warnings[warned:]:
                console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
            warned = len(report.warnings)
            bar.update(task, completed=report.step, total=report.steps, description=describe(report))
            due = time.monotonic() - last >= LINE_EVERY_S or report.step == report.steps
            if bar.disable and due:
                last = time.monotonic()
                left = (report.steps - report.step) / max(report.steps_per_second, 1e-9)
                line = f"step {report.step}/{report.steps}, {describe(report)}, {left / 60:.0f} min left"
                print(line, file=sys.stderr, flush=True)

        yield tell


def describe(report: StepReport) -> str:
    """Say in a few words how a training goes.

    Args:
        report: of the last step.

    Returns:
        Loss, speed, and what was last found on photos kept out of training.
    """
    told = f"loss {report.values['loss']:.3f}, {report.images_per_second:.1f} images/s"
    names = {"patch_cosine": "held-out patch cosine", "knn_top1": "k-NN"}
    found = [f"{words} {report.validation[name]:.3f}" for name, words in names.items() if name in report.validation]
    return ", ".join([told, *found])
