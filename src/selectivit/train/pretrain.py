"""`pretrain`: train a ViT without labels by DINO's recipe, with softmax or entmax."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from selectivit.data.multi_crop import MultiCropImages, collate_crops
from selectivit.data.photos import open_photos
from selectivit.data.writing import check_writable
from selectivit.models.saving import save_model
from selectivit.train.checkpoints import earlier_checkpoint, steps_done
from selectivit.train.dino_job import DinoJob, dino_card
from selectivit.train.dino_settings import DinoSettings
from selectivit.train.export import write_folder
from selectivit.train.fitting import carry_out
from selectivit.train.keeper import Keeper, StepReport, no_report
from selectivit.train.loader import make_loader, own_batches
from selectivit.train.resume import claim_folder, write_run
from selectivit.train.self_distillation import SelfDistillation
from selectivit.train.settings import Running


@dataclass(frozen=True)
class PretrainResult:
    """What came out.

    Args:
        final: folder of the last teacher.
        best: folder of the teacher of the best k-NN; None where the photos have no classes.
        validation: the last test: "knn_top1".
        best_validation: that of the best teacher, with its "step".
        values: of the last step: loss, entropies, spread.
        skipped: photos that could not be read, by name, with the reason, and paths that held none.
        warnings: signs of a collapse.
        notes: what was left out, and why.
        kept: True where the folder held the finished run already.
    """

    final: Path
    best: Path | None
    validation: Mapping[str, float]
    best_validation: Mapping[str, float]
    values: Mapping[str, float]
    skipped: Mapping[str, str]
    warnings: Sequence[str]
    notes: Sequence[str]
    kept: bool = False


def pretrain(
    photos: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    settings: DinoSettings | None = None,
    running: Running | None = None,
    *,
    card_note: str = "",
    command: str = "",
    tell: Callable[[StepReport], None] = no_report,
) -> PretrainResult:
    """Train a ViT without labels by DINO's recipe.

    A folder that holds a run of the same settings is gone on with, to the very weights that an unbroken run gives.
    Under torchrun the batch is split among the processes, with the same result up to rounding.

    Args:
        photos: as for `open_photos`: photos, folders, lists, tar shards, datasets. Sub-folders are classes for k-NN.
        out: folder for checkpoints, logs, and the teachers "final" and "best".
        settings: what decides the result.
        running: device, workers, checkpoints.
        card_note: for the model card: terms of use.
        command: for the model card: what made the model; the process's own arguments where empty.
        tell: called after each step, in the first process.

    Returns:
        Where the teachers are, and how the run went.

    Raises:
        ValueError: no photo that can be read, crops that do not fit the model, a folder with another run.
        NotFiniteError: loss or gradients that are not finite; the last good checkpoint is kept.
        WriteError: the folder cannot be written, or the disk is full; likewise.
        KeyboardInterrupt: Ctrl-C, after a checkpoint.

    Example:
        >>> result = pretrain(["photos"], "out", DinoSettings(attention="entmax15"))  # doctest: +SKIP

    Source: DINO, arXiv 2104.14294; with entmax-1.5, arXiv 2605.23868.
    """
    settings, running, folder = settings or DinoSettings(), running or Running(), Path(out)
    first = int(os.environ.get("RANK", 0)) == 0
    found, problems = open_photos(photos)
    job = DinoJob.prepare(found, photos, settings, running)
    job.skipped.update(dict.fromkeys(problems, "not found"))
    own_batches(job.schedule, job.settings)  # a batch that cannot be split is refused before anything is written
    earlier = claim_folder(folder, job.record)
    if earlier and earlier["state"] == "done":
        return _result(folder, earlier["result"], kept=True)
    if first:
        check_writable(folder)
        write_run(folder, job.record, "running", {})
    write_card = partial(dino_card, job, command or " ".join(sys.argv), card_note)
    return _train(job, folder, write_card, running, tell, first)


def _train(
    job: DinoJob,
    out: Path,
    write_card: Callable[[Mapping[str, Any]], str],
    running: Running,
    tell: Callable[[StepReport], None],
    first: bool,
) -> PretrainResult:
    settings, schedule = job.settings, job.schedule
    batches = own_batches(schedule, settings, steps_done(earlier_checkpoint(out)))
    module = SelfDistillation(job.pair, settings, schedule, batches)

    def save(name: str, step: int, numbers: Mapping[str, float]) -> None:
        write_folder(out / name, partial(save_model, job.pair.teacher), write_card({**numbers, "step": step}))

    compare = (lambda _: {}) if job.neighbours is None else partial(job.neighbours.accuracy, job.pair)
    rhythm = (job.validate_every, running.checkpoint_every, False)
    keeper = Keeper(out, compare, "knn_top1", *rhythm, partial(save, "best"), tell)
    images = MultiCropImages(job.training, settings.seed, settings.crops)
    pin = running.device.startswith("cuda")
    loader = make_loader(images, batches, running.workers, pin, collate_crops)
    skipped = carry_out(module, loader, keeper, out, job, running.device)
    result = {"validation": keeper.validation, "best": keeper.best, "values": module.latest, "skipped": skipped}
    result |= {"warnings": module.warnings, "notes": job.notes, "steps": schedule.steps}
    if first:
        save("final", schedule.steps, keeper.validation)
        write_run(out, job.record, "done", result)
    return _result(out, result, kept=False)


def _result(out: Path, result: Mapping[str, Any], *, kept: bool) -> PretrainResult:
    best = out / "best" if result["best"] else None
    told = {name: result[name] for name in ("validation", "values", "skipped", "warnings", "notes")}
    return PretrainResult(out / "final", best, best_validation=result["best"], **told, kept=kept)
