"""What papers report of probes: to stand beside what is measured here, never in one ranking with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    """A number that a paper reports; it was not measured here.

    Args:
        task: the kind of probe, as `selectivit probe` calls it.
        data: the data set.
        model: the model, in the paper's words.
        metric: what the number is.
        value: in the metric's unit: per cent for top-1 and mIoU, metres for RMSE.
        source: the paper.
        note: what else is known of how it came about.
    """

    task: str
    data: str
    model: str
    metric: str
    value: float
    source: str
    note: str = ""


INTERACTION = "Vision Transformers Need Better Token Interaction, arXiv 2605.23868"
VECA = "Elastic Attention Cores for Scalable Vision Transformers, arXiv 2605.12491"
DINO = "DINO, arXiv 2104.14294, its public repository"
_TRAINED = "DINO ViT-S/16, 200 epochs on ImageNet-1k; the probe's settings are not public"
_BASE = "ViT-B; the probe's settings are the paper's"


def _rows(task: str, data: str, metric: str, models: dict[str, float], source: str, note: str) -> tuple[Reported, ...]:
    return tuple(Reported(task, data, model, metric, value, source, note) for model, value in models.items())


REPORTED: tuple[Reported, ...] = (
    *_rows("knn", "ImageNet-1k", "top-1 %", {"DINO ViT-S/16, 100 epochs": 69.3}, DINO, ""),
    *_rows(
        "linear", "ImageNet-1k", "top-1 %", {"DINO ViT-S/16, 100 epochs": 74.0}, DINO, "class tokens, last 4 blocks"
    ),
    *_rows("linear", "ImageNet-1k", "top-1 %", {"softmax": 69.50, "entmax-1.5": 70.06}, INTERACTION, _TRAINED),
    *_rows(
        "linear",
        "ImageNet-1k",
        "top-1 %",
        {"DINOv3": 83.56, "VECA, 64 cores": 81.93, "VECA, 8 cores": 79.99},
        VECA,
        _BASE,
    ),
    *_rows("segmentation", "VOC", "mIoU %", {"softmax": 42.80, "entmax-1.5": 48.78}, INTERACTION, _TRAINED),
    *_rows("segmentation", "ADE20K", "mIoU %", {"softmax": 19.85, "entmax-1.5": 21.97}, INTERACTION, _TRAINED),
    *_rows("segmentation", "Cityscapes", "mIoU %", {"softmax": 36.79, "entmax-1.5": 37.87}, INTERACTION, _TRAINED),
    *_rows(
        "segmentation",
        "PASCAL Context",
        "mIoU %",
        {"DINOv3": 57.74, "VECA, 64 cores": 57.46, "VECA, 8 cores": 53.30},
        VECA,
        _BASE,
    ),
    *_rows("segmentation", "VOC 2012", "mIoU %", {"DINOv3": 87.50, "VECA, 64 cores": 87.07}, VECA, _BASE),
    *_rows("depth", "NYUv2", "RMSE m", {"DINOv3": 0.3684, "VECA, 64 cores": 0.3705}, VECA, _BASE),
)
"""All that is known here, by task; the papers' other rows are not public."""


def reported_for(task: str) -> tuple[Reported, ...]:
    """What papers report of a task.

    Args:
        task: such as "segmentation".

    Returns:
        The numbers; none where no paper's are known here.

    Example:
        >>> [row.value for row in reported_for("depth")], reported_for("point-in-box")
        ([0.3684, 0.3705], ())
    """
    return tuple(row for row in REPORTED if row.task == task)
