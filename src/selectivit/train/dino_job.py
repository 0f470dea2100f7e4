"""All that a pretraining needs, found out before its first step, and the record of what decides its result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selectivit.data.classes import LabelledCrops, photo_classes
from selectivit.data.digest import names_digest
from selectivit.data.photos import Photos, PhotoSubset
from selectivit.data.training_images import epoch_order
from selectivit.train.dino_pair import DinoPair
from selectivit.train.dino_schedule import DinoSchedule
from selectivit.train.dino_settings import DinoSettings
from selectivit.train.export import model_card
from selectivit.train.job import check_readable, split
from selectivit.train.loader import spare_cores
from selectivit.train.neighbours import Neighbours
from selectivit.train.precision import resolve_precision
from selectivit.train.settings import Running


@dataclass
class DinoJob:
    """All that a run needs, and the record of what decides its result."""

    pair: DinoPair
    schedule: DinoSchedule
    settings: DinoSettings
    training: PhotoSubset
    neighbours: Neighbours | None
    record: dict[str, Any]
    precision: str
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls, photos: Photos, roots: Sequence[str | os.PathLike[str]], settings: DinoSettings, running: Running
    ) -> DinoJob:
        """Build and check everything.

        Args:
            photos: all.
            roots: the paths that they were found by; sub-folders of these are classes.
            settings: what decides the result.
            running: for the device and the workers.

        Returns:
            The job.

        Raises:
            ValueError: no photo that can be read, no classes where k-NN was asked for, an unknown model, or crops that
                do not fit it.
        """
        classes = None if settings.knn == "off" else photo_classes(photos, roots)
        if classes is None and settings.knn == "on":
            raise ValueError(
                "expected photos in two sub-folders or more, one a class, for k-NN: found none or one; without classes "
                "leave k-NN on auto, or turn it off"
            )
        training, held_out = split(photos, settings.knn_queries if classes else 0, settings.seed)
        check_readable(training)
        notes = [] if classes or settings.knn == "off" else ["the photos have no classes: no k-NN on the way"]
        if classes and not len(held_out):
            notes.append(f"{len(photos)} photos are too few to keep some out of training: no k-NN on the way")
        neighbours = _neighbours(classes, training, held_out, settings, running) if classes and len(held_out) else None
        pair = DinoPair(settings)
        precision = resolve_precision(settings.precision, running.device)
        record = _record(photos, settings, neighbours, precision)
        schedule = DinoSchedule(settings, len(training))
        return cls(pair, schedule, settings, training, neighbours, record, precision, notes)

    @property
    def validate_every(self) -> int:
        """Steps between two tests by k-NN."""
        return self.settings.validate_every or max(1, len(self.training) // self.settings.batch_size)


def _neighbours(
    classes: Sequence[str], training: PhotoSubset, held_out: PhotoSubset, settings: DinoSettings, running: Running
) -> Neighbours:
    numbers = {name: number for number, name in enumerate(sorted(set(classes)))}
    few = epoch_order(len(training), settings.seed, -2)[: settings.knn_bank].tolist()
    bank = PhotoSubset(training.photos, [training.indices[place] for place in sorted(few)])
    size = settings.crops.global_size
    bank, queries = (
        LabelledCrops(part, [numbers[classes[index]] for index in part.indices], size) for part in (bank, held_out)
    )
    workers = spare_cores() if running.workers is None else running.workers
    at_once = min(settings.batch_size, 64)
    return Neighbours(bank, queries, settings.knn_k, settings.knn_temperature, at_once, workers)


def _record(photos: Photos, settings: DinoSettings, neighbours: Neighbours | None, precision: str) -> dict[str, Any]:
    from selectivit import __version__

    knn = None
    if neighbours is not None:
        counts = {"classes": neighbours.classes, "bank": len(neighbours.bank), "queries": len(neighbours.queries)}
        knn = {**counts, "k": neighbours.k, "temperature": neighbours.temperature}
    return {
        "selectivit": __version__,
        "photos": {"count": len(photos), "sha256": names_digest(photos.name(i) for i in range(len(photos)))},
        "nearest_neighbours": knn,
        **settings.record(),
        "precision": precision,
    }


def dino_card(job: DinoJob, command: str, note: str, numbers: Mapping[str, Any]) -> str:
    """Write the model card of a teacher of this job.

    Args:
        job: the job.
        command: that made it.
        note: the author's own words.
        numbers: of the test by k-NN, and the "step".

    Returns:
        Markdown, with {use} still to be filled.
    """
    record, settings = job.record, job.settings
    facts = {
        "Model": {name: record[name] for name in ("model", "attention", "registers", "specialization")},
        "Data": {**record["photos"], "trained on": len(job.training)},
        "Training": {
            "epochs": round(int(numbers["step"]) * settings.batch_size / len(job.training), 2),
            "batch size": settings.batch_size,
            "crops": record["crops"],
        },
        "Numbers (measured here)": {**numbers, "k-NN": record["nearest_neighbours"] or "the photos have no classes"},
    }
    made = "Pretrained without labels by DINO's recipe (arXiv 2104.14294) with selectivit; this is the teacher."
    return model_card(f"{settings.model}, {settings.attention}", facts, command, note, made)
