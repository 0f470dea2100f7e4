"""`distill`: train a student to give a frozen teacher's dense features."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selectivit.data.digest import names_digest, tensors_digest
from selectivit.data.images import ImageError
from selectivit.data.photos import Photos, PhotoSource, PhotoSubset, open_photos
from selectivit.data.seeding import derived_seed, seeded
from selectivit.data.training_images import TrainingImages, centre_crops, epoch_order
from selectivit.data.writing import check_writable, write_json
from selectivit.models.weights import load_model
from selectivit.swap.learn_scale import swapped_rules
from selectivit.train.agreement import Agreement
from selectivit.train.checkpoints import CHECKPOINT
from selectivit.train.distillation import Distillation
from selectivit.train.export import export_student, model_card
from selectivit.train.fitting import fit, resolve_precision
from selectivit.train.keeper import Keeper, StepReport, no_report
from selectivit.train.loader import StepBatches, make_loader
from selectivit.train.pair import Pair, expected_images
from selectivit.train.resume import claim_folder, write_run
from selectivit.train.schedule import Schedule
from selectivit.train.settings import DistillSettings, Running
from selectivit.train.students import build_student

SKIPPED, EXAMPLES = "skipped.json", 4


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
        card_note: for the model card: terms of use.
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
    job = _Job.prepare(student, teacher, found, settings, running, student_arguments)
    job.skipped.update(dict.fromkeys(problems, "not found"))
    earlier = claim_folder(folder, job.record)
    if earlier and earlier["state"] == "done":
        return _result(folder, earlier["result"], kept=True)
    if first:
        check_writable(folder)
        write_run(folder, job.record, "running", {})
    card = partial(_card, job, command or " ".join(sys.argv), card_note)
    return _train(job, folder, card, running, tell, first)


@dataclass
class _Job:
    """All that a run needs, and the record of what decides its result."""

    pair: Pair
    schedule: Schedule
    settings: DistillSettings
    training: PhotoSource
    crops: list[Tensor]
    examples: list[Tensor]  # on which a swapped student's factors are described
    record: dict[str, Any]
    precision: str
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        student: Any,
        teacher: Any,
        photos: Photos,
        settings: DistillSettings,
        running: Running,
        arguments: Mapping[str, Any] | None,
    ) -> _Job:
        training, held_out = split(photos, settings.holdout, settings.seed)
        _check_readable(training)
        names = {"student": _called(student), "teacher": _called(teacher)}
        if not isinstance(teacher, nn.Module):
            teacher = load_model(teacher)
        if not isinstance(student, nn.Module):
            student = build_student(student, teacher, seed=settings.seed, arguments=arguments)
        elif arguments:
            raise ValueError("student_arguments are for a student by name: this one is made already")
        schedule = settings.full_schedule().at_sizes(expected_images(student).patch_size)
        with seeded(derived_seed(settings.seed, "head")):
            pair = Pair(
                student.train(), teacher, sizes=schedule.sizes, grid=settings.grid, learn_scale=settings.learn_scale
            )
        crops, skipped = centre_crops(held_out, range(len(held_out)), schedule.last_size)
        examples = crops[:EXAMPLES] or centre_crops(training, range(len(training)), schedule.last_size, EXAMPLES)[0]
        precision = resolve_precision(settings.precision, running.device)
        record = _record(pair, names, photos, settings, arguments, precision)
        return cls(pair, schedule, settings, training, crops, examples, record, precision, dict(skipped))


def _train(
    job: _Job,
    out: Path,
    card: Callable[[Mapping[str, Any]], str],
    running: Running,
    tell: Callable[[StepReport], None],
    first: bool,
) -> DistillResult:
    settings = job.settings
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    checkpoint = out / CHECKPOINT if (out / CHECKPOINT).is_file() else None
    start = _steps_done(checkpoint)
    batches = StepBatches(job.schedule, settings.batch_size, settings.accumulate, rank, world, settings.seed, start)
    module = Distillation(job.pair, settings, job.schedule, batches)

    def save_best(step: int, best: dict[str, float]) -> None:
        export_student(out / "best", job.pair, card({"step": step, **best}), job.examples)

    share = Agreement(job.crops[rank::world], max(1, settings.batch_size // world))
    keeper = Keeper(out, share, settings.validate_every, running.checkpoint_every, save_best, tell)
    images = TrainingImages(job.training, settings.seed, settings.augment)
    loader = make_loader(images, batches, running.workers, pin=running.device.startswith("cuda"))
    try:
        fit(module, loader, keeper, out, checkpoint, job.precision, running.device)
    finally:
        skipped = {**job.skipped, **keeper.skipped, **module.skipped}
        if first and skipped:
            listed = [{"source": name, "reason": reason} for name, reason in sorted(skipped.items())]
            write_json(out / SKIPPED, {"count": len(listed), "skipped": listed})
    if module.stopping:
        raise KeyboardInterrupt
    result = {"validation": keeper.validation, "best": keeper.best, "skipped": skipped, "steps": job.schedule.steps}
    if first:
        export_student(out / "final", job.pair, card({"step": job.schedule.steps, **keeper.validation}), job.examples)
        write_run(out, job.record, "done", result)
    return _result(out, result, kept=False)


def split(photos: Photos, holdout: int, seed: int) -> tuple[PhotoSubset, PhotoSubset]:
    """Hold some photos out.

    Args:
        photos: all.
        holdout: how many, at most a fifth of all.
        seed: of the choice.

    Returns:
        The photos to train on, and the others.

    Example:
        >>> from selectivit.data.photos import PhotoFiles
        >>> [len(part) for part in split(Photos([PhotoFiles(["a", "b", "c", "d", "e"])]), holdout=64, seed=0)]
        [4, 1]
    """
    order = epoch_order(len(photos), seed, -1).tolist() if len(photos) else []
    count = min(holdout, len(photos) // 5)
    return PhotoSubset(photos, sorted(order[count:])), PhotoSubset(photos, sorted(order[:count]))


def _check_readable(photos: PhotoSource) -> None:
    """Find one photo that can be read: it is better said now than by a worker."""
    reason = ""
    for index in range(len(photos)):
        try:
            photos.read(index)
        except ImageError as error:
            reason = str(error)
        else:
            return
    if not len(photos):
        raise ValueError("no photo to train on: expected photos, folders, lists (.txt), shards (.tar) or datasets")
    raise ImageError(f"none of the {len(photos)} photos can be read; the last: {reason}")


def _record(
    pair: Pair,
    names: Mapping[str, str],
    photos: Photos,
    settings: DistillSettings,
    arguments: Mapping[str, Any] | None,
    precision: str,
) -> dict[str, Any]:
    from selectivit import __version__

    rules = [
        {"layer": site.name, "normalizer": rule.normalizer, "alpha": _plain(rule.alpha), "scores": rule.scores}
        | {"scale": _plain(rule.scale), "temperature": rule.temperature, "combine": rule.combine}
        for site, rule in swapped_rules(pair.student)
    ]
    student, teacher = pair.student.state_dict(), pair.teacher.state_dict()
    return {
        "selectivit": __version__,
        "student": {"name": names["student"], "weights_sha256": tensors_digest(student), "swap": rules}
        | ({"arguments": dict(arguments)} if arguments else {}),
        "teacher": {"name": names["teacher"], "weights_sha256": tensors_digest(teacher)},
        "photos": {"count": len(photos), "sha256": names_digest(photos.name(i) for i in range(len(photos)))},
        **settings.record(),
        "precision": precision,
    }


def _plain(value: Any) -> Any:
    return value.detach().tolist() if isinstance(value, Tensor) else value


def _called(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}" if isinstance(model, nn.Module) else str(model)


def _card(job: _Job, command: str, note: str, numbers: Mapping[str, Any]) -> str:
    record = job.record
    teacher, student = record["teacher"], record["student"]
    facts = {
        "Student": {"model": student["name"], "swapped layers": len(student["swap"])},
        "Teacher": {"model": teacher["name"], "weights sha256": teacher["weights_sha256"]},
        "Data": {**record["photos"], "held out": len(job.crops)},
        "Numbers (measured here)": {
            **numbers,
            "on": f"{len(job.crops)} held-out photos, middle crop of {job.schedule.last_size} px, all cores",
            "photos seen": int(numbers["step"]) * record["batch_size"],
        },
    }
    return model_card(f"{student['name']}, distilled from {teacher['name']}", facts, command, note)


def _steps_done(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    from selectivit.train.checkpoints import WholeCheckpoints

    return int(WholeCheckpoints().load_checkpoint(checkpoint, map_location=torch.device("meta"))["global_step"])


def _result(out: Path, result: Mapping[str, Any], *, kept: bool) -> DistillResult:
    best = out / "best" if result["best"] else None
    return DistillResult(out / "final", best, result["validation"], result["best"], result["skipped"], kept)
