"""`distill`: train a student to give a frozen teacher's dense features."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from selectivit.data.digest import names_digest
from selectivit.data.photos import open_photos
from selectivit.data.training_images import TrainingImages
from selectivit.data.writing import check_writable
from selectivit.train.agreement import Agreement
from selectivit.train.checkpoints import earlier_checkpoint, steps_done
from selectivit.train.distillation import Distillation
from selectivit.train.export import export_student, rewrite_terms
from selectivit.train.fitting import carry_out
from selectivit.train.job import Job, card
from selectivit.train.keeper import Keeper, StepReport, no_report
from selectivit.train.loader import make_loader, own_batches
from selectivit.train.resume import claim_folder, write_run
from selectivit.train.settings import DistillSettings, Running
from selectivit.train.teacher_cache import TeacherCache

TEACHER = "teacher"


@dataclass(frozen=True)
class DistillResult:
    """What came out.

    Args:
        final: folder of the last student.
        best: folder of the student that agreed best with the teacher; None without held-out photos.
        validation: the last comparison: "global_cosine" and "patch_cosine".
        best_validation: that of the best student, with its "step".
        skipped: photos that could not be read, by name, with the reason, and paths that held none.
        kept: True where the folder held the finished run already.
    """

    final: Path
    best: Path | None
    validation: Mapping[str, float]
    best_validation: Mapping[str, float]
    skipped: Mapping[str, str]
    kept: bool = False


def distill(
    student: str | os.PathLike[str] | nn.Module,
    teacher: str | os.PathLike[str] | nn.Module,
    photos: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    settings: DistillSettings | None = None,
    running: Running | None = None,
    *,
    student_arguments: Mapping[str, Any] | None = None,
    card_note: str = "",
    command: str = "",
    tell: Callable[[StepReport], None] = no_report,
) -> DistillResult:
    """Train a student to give a frozen teacher's global and patch features.

    A folder that holds a run of the same settings is gone on with, to the very weights that an unbroken run gives.
    A student that is not new is compared with the teacher before the first step too: "best" is that one as long as
    training has not bettered it.
    Under torchrun the batch is split among the processes, with the same result up to rounding.

    Args:
        student: a model, trained in place, swapped or not; or a name: of a core-periphery model, made new, or anything
            that `load_model` takes.
        teacher: a model, or a name as for `load_model`.
        photos: as for `open_photos`: photos, folders, lists, tar shards, datasets.
        out: folder for checkpoints, logs, and the students "final" and "best".
        settings: what decides the result.
        running: device, workers, checkpoints.
        student_arguments: of a core-periphery student, such as num_cores.
        card_note: for the model cards: terms of use; of a finished run they are rewritten.
        command: for the model card: what made the model; the process's own arguments where empty.
        tell: called after each step, in the first process.

    Returns:
        Where the students are, and how well they agree with the teacher.

    Raises:
        ValueError: no photo that can be read, models that do not fit each other, a folder with another run.
        NotFiniteError: loss or gradients that are not finite; the last good checkpoint is kept.
        WriteError: the folder cannot be written, or the disk is full; likewise.
        KeyboardInterrupt: Ctrl-C, after a checkpoint.

    Example:
        >>> result = distill("veca_tiny_patch14", "dinov2-small", ["photos"], "out")  # doctest: +SKIP

    Source: VECA, arXiv 2605.12491.
    """
    settings, running, folder = settings or DistillSettings(), running or Running(), Path(out)
    first = int(os.environ.get("RANK", 0)) == 0
    found, problems = open_photos(photos)
    job = Job.prepare(student, teacher, found, settings, running, student_arguments)
    job.skipped.update(dict.fromkeys(problems, "not found"))
    own_batches(job.schedule, settings)  # a batch that cannot be split is refused before anything is written
    earlier = claim_folder(folder, job.record)
    if earlier and earlier["state"] == "done":
        if first and card_note:
            rewrite_terms(folder, card_note)
        return _result(folder, earlier["result"], kept=True)
    if first:
        check_writable(folder)
        write_run(folder, job.record, "running", {})
    write_card = partial(card, job, command or " ".join(sys.argv), card_note)
    result = _train(job, folder, write_card, running, tell, first)
    if first and card_note:
        rewrite_terms(folder, card_note)  # the best student's card may be of an earlier start, with another note
    return result


def _train(
    job: Job,
    out: Path,
    write_card: Callable[[Mapping[str, Any]], str],
    running: Running,
    tell: Callable[[StepReport], None],
    first: bool,
) -> DistillResult:
    settings = job.settings
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    batches = own_batches(job.schedule, settings, steps_done(earlier_checkpoint(out)))
    cache = None if settings.views is None else _teacher_cache(job, running.teacher_cache or out / TEACHER)
    module = Distillation(job.pair, settings, job.schedule, batches, cache)

    def save_best(step: int, best: dict[str, float]) -> None:
        export_student(out / "best", job.pair, write_card({"step": step, **best}), job.examples)

    share = Agreement(job.crops[rank::world], max(1, settings.batch_size // world))
    compare = partial(share.means, job.pair)
    rhythm = (settings.validate_every, running.checkpoint_every, job.may_be_trained)
    keeper = Keeper(out, compare, "patch_cosine", *rhythm, save_best, tell)
    images = TrainingImages(job.training, settings.seed, settings.augment, settings.views)
    loader = make_loader(images, batches, running.workers, pin=running.device.startswith("cuda"))
    with nullcontext() if cache is None else closing(cache):
        skipped = carry_out(module, loader, keeper, out, job, running.device)
    result = {"validation": keeper.validation, "best": keeper.best, "skipped": skipped, "steps": job.schedule.steps}
    if first:
        export_student(
            out / "final", job.pair, write_card({"step": job.schedule.steps, **keeper.validation}), job.examples
        )
        write_run(out, job.record, "done", result)
    return _result(out, result, kept=False)


def _teacher_cache(job: Job, folder: Path) -> TeacherCache:
    names = names_digest(job.training.name(i) for i in range(len(job.training)))
    identity = {
        "teacher": job.record["teacher"]["weights_sha256"],
        "precision": job.precision,
        "training photos": names,
        **{name: getattr(job.settings, name) for name in ("seed", "augment", "views")},
    }
    return TeacherCache(folder, identity, job.pair)


def _result(out: Path, result: Mapping[str, Any], *, kept: bool) -> DistillResult:
    best = out / "best" if result["best"] else None
    return DistillResult(out / "final", best, result["validation"], result["best"], result["skipped"], kept)
