"""All that a distillation needs, found out before its first step, and the record of what decides its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from selectivit.data.digest import names_digest, tensors_digest
from selectivit.data.images import ImageError
from selectivit.data.photos import Photos, PhotoSource, PhotoSubset
from selectivit.data.seeding import derived_seed, seeded
from selectivit.data.training_images import centre_crops, epoch_order
from selectivit.features import preprocessing
from selectivit.models.create import BUILDERS
from selectivit.models.weights import load_model
from selectivit.swap.learn_scale import swapped_rules
from selectivit.train.export import model_card
from selectivit.train.pair import Pair
from selectivit.train.precision import resolve_precision
from selectivit.train.schedule import Schedule
from selectivit.train.settings import DistillSettings, Running
from selectivit.train.students import build_student

EXAMPLES = 4


@dataclass
class Job:
    """All that a run needs, and the record of what decides its result."""

    pair: Pair
    schedule: Schedule
    settings: DistillSettings
    training: PhotoSource
    crops: list[Tensor]
    examples: list[Tensor]  # on which a swapped student's factors are described
    record: dict[str, Any]
    precision: str
    may_be_trained: bool  # the student: no new one
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
    ) -> Job:
        """Load and check everything.

        Args:
            student: a model or a name.
            teacher: a model or a name.
            photos: all.
            settings: what decides the result.
            running: for the device.
            arguments: of a core-periphery student by name.

        Returns:
            The job.

        Raises:
            ValueError: no photo that can be read, unknown models, or models that do not fit each other.
        """
        training, held_out = split(photos, settings.holdout, settings.seed)
        check_readable(training)
        names = {"student": _called(student), "teacher": _called(teacher)}
        may_be_trained = isinstance(student, nn.Module) or str(student) not in BUILDERS
        if not isinstance(teacher, nn.Module):
            teacher = load_model(teacher)
        if not isinstance(student, nn.Module):
            student = build_student(student, teacher, seed=settings.seed, arguments=arguments)
        elif arguments:
            raise ValueError("student_arguments are for a student by name: this one is made already")
        schedule = settings.full_schedule().at_sizes(preprocessing(student).patch_size)
        with seeded(derived_seed(settings.seed, "head")):
            pair = Pair(
                student.train(), teacher, sizes=schedule.sizes, grid=settings.grid, learn_scale=settings.learn_scale
            )
        _check_budgets(pair, settings)
        crops, skipped = centre_crops(held_out, range(len(held_out)), schedule.last_size)
        examples = crops[:EXAMPLES] or centre_crops(training, range(len(training)), schedule.last_size, EXAMPLES)[0]
        precision = resolve_precision(settings.precision, running.device)
        record = _record(pair, names, photos, settings, arguments, precision)
        whole = (pair, schedule, settings, training, crops, examples, record, precision, may_be_trained)
        return cls(*whole, dict(skipped))


def _check_budgets(pair: Pair, settings: DistillSettings) -> None:
    if settings.budgets is None:
        return
    if pair.num_cores is None:
        raise ValueError(f"{type(pair.student).__name__} has no cores: budgets mean nothing to it")
    if max(settings.budgets.budgets) > pair.num_cores:
        raise ValueError(f"expected budgets of up to {pair.num_cores} cores, got {settings.budgets.budgets}")


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


def check_readable(photos: PhotoSource) -> None:
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


def card(job: Job, command: str, note: str, numbers: Mapping[str, Any]) -> str:
    """Write the model card of a student of this job.

    Args:
        job: the job.
        command: that made it.
        note: the author's own words.
        numbers: of the comparison with the teacher, and the "step".

    Returns:
        Markdown, with {use} still to be filled.
    """
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
