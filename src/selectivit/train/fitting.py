"""Lightning's Trainer as our trainings need it: quiet, resumed exactly, on whatever devices there are."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy

from selectivit.train.checkpoints import WholeCheckpoints, earlier_checkpoint
from selectivit.train.keeper import Keeper
from selectivit.train.loader import StepLoader
from selectivit.train.resume import note_stop, write_skipped
from selectivit.train.step_module import StepModule

LIGHTNING_PRECISION = {"bf16": "bf16-mixed", "float32": "32-true"}


class Prepared(Protocol):
    """What a training finds out before its first step.

    Args:
        record: all that decides the result.
        precision: "bf16" or "float32".
        skipped: what could not be read, and why.
    """

    record: dict[str, Any]
    precision: str
    skipped: dict[str, str]


def carry_out(
    module: StepModule, loader: StepLoader, keeper: Keeper, out: Path, job: Prepared, device: str
) -> dict[str, str]:
    """Train to the end, and leave run.json and skipped.json right however it ends.

    Args:
        module: the step.
        loader: its batches, from the checkpoint's step on.
        keeper: what happens between steps.
        out: the run's folder; its checkpoint is gone on from.
        job: what was found out before.
        device: as for `Running`.

    Returns:
        All that was skipped, and why.

    Raises:
        KeyboardInterrupt: Ctrl-C, after a checkpoint; a second one, which waited for nothing.
    """
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        fit(module, loader, keeper, out, earlier_checkpoint(out), job.precision, device)
        if module.stopping:
            raise KeyboardInterrupt
    except BaseException as error:
        if first:
            note_stop(out, job.record, keeper.saved, error)
        raise
    finally:
        skipped = {**job.skipped, **keeper.skipped, **module.skipped}
        if first:
            write_skipped(out, skipped)
    return skipped


def fit(
    module: StepModule,
    loader: StepLoader,
    keeper: Keeper,
    out: Path,
    checkpoint: Path | None,
    precision: str,
    device: str,
) -> None:
    """Train to the end, to Ctrl-C, or to an error.

    Args:
        module: the step.
        loader: its batches, from the checkpoint's step on.
        keeper: what happens between steps.
        out: the run's folder.
        checkpoint: to go on from; None begins.
        precision: "bf16" or "float32".
        device: as for `Running`.

    Raises:
        KeyboardInterrupt: a second Ctrl-C, which waited for nothing.
    """
    options = _devices(device)
    with _quiet():
        trainer = L.Trainer(
            **options,
            precision=LIGHTNING_PRECISION[precision],  # pyright: ignore[reportArgumentType]
            max_steps=module.steps,
            accumulate_grad_batches=module.settings.accumulate,
            callbacks=[keeper],
            plugins=[WholeCheckpoints()],
            logger=TensorBoardLogger(out, name="logs", version=""),
            default_root_dir=out,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            limit_val_batches=0,
            log_every_n_steps=1,
        )
        try:
            trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
        except SystemExit as stop:  # Lightning's answer to KeyboardInterrupt
            raise KeyboardInterrupt from stop


def _devices(device: str) -> dict[str, Any]:
    """Accelerator, devices and strategy; torchrun's environment says how many processes there are."""
    kind, _, index = device.partition(":")
    accelerator = {"cuda": "gpu"}.get(kind, kind)
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if world == 1:
        return {"accelerator": accelerator, "devices": [int(index)] if index else 1}
    backend = "nccl" if kind == "cuda" else "gloo"
    # A small budget leaves some core tokens without gradients.
    strategy = DDPStrategy(process_group_backend=backend, find_unused_parameters=True)
    return {"accelerator": accelerator, "devices": local, "num_nodes": world // local, "strategy": strategy}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hush what Lightning tells everyone: hints at its products, at workers, at summaries."""
    # lightly imports Lightning under its other name, which then speaks for both.
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
