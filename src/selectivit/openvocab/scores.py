"""Scores of a segmentation: a confusion matrix, and what is read from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHIFT_RECALL, SHIFT_TIMES, SHIFT_CLASSES = 0.25, 3.0, 4


@dataclass(frozen=True)
class SegmentationScores:
    """What a confusion matrix says of a segmentation.

    Args:
        classes: their names.
        confusion: (K, K) int64, pixels of class i (row) that were taken for class j (column); void counts nowhere.

    Raises:
        ValueError: a matrix of another size than the classes.

    Example:
        >>> scores = SegmentationScores(("sky", "road"), torch.tensor([[3, 1], [0, 4]]))
        >>> round(scores.miou, 3), scores.pixel_accuracy, scores.class_accuracy.tolist()
        (0.775, 0.875, [0.75, 1.0])

    Source: mean IoU by torchmetrics' MulticlassJaccardIndex.
    """

    classes: tuple[str, ...]
    confusion: Tensor

    def __post_init__(self) -> None:
        if self.confusion.shape != (len(self.classes),) * 2:
            raise ValueError(f"{len(self.classes)} classes and a matrix of {tuple(self.confusion.shape)}")

    @property
    def iou(self) -> Tensor:
        """(K,) intersection over union; NaN for a class that is in no label and no prediction."""
        seen = (self.confusion.sum(0) + self.confusion.sum(1)) > 0
        return self._jaccard("none").masked_fill(~seen, torch.nan)

    @property
    def miou(self) -> float:
        """The mean over classes that occur in labels or predictions; NaN where no pixel counts."""
        return float(self._jaccard("macro"))

    @property
    def class_accuracy(self) -> Tensor:
        """(K,) the share of a class's pixels that were found; NaN for a class that is in no label."""
        return self.confusion.diagonal() / self.confusion.sum(1)

    @property
    def mean_accuracy(self) -> float:
        """The mean of `class_accuracy` over classes that occur in labels."""
        return float(self.class_accuracy.nanmean())

    @property
    def pixel_accuracy(self) -> float:
        """The share of all pixels that were found."""
        return float(self.confusion.diagonal().sum() / self.confusion.sum())

    def table(self) -> list[dict[str, Any]]:
        """For each class its name, IoU, accuracy, and pixels in labels and predictions; None where a score is NaN."""
        columns = (self.iou.tolist(), self.class_accuracy.tolist())
        shares = [[None if value != value else value for value in column] for column in columns]
        counts = self.confusion.sum(1).tolist(), self.confusion.sum(0).tolist()
        keys = ("name", "iou", "accuracy", "pixels", "predicted")
        return [dict(zip(keys, row, strict=True)) for row in zip(self.classes, *shares, *counts, strict=True)]

    def shift(self) -> int:
        """Tell labels that are counted from another number than the predictions.

        Returns:
            1 or -1 where predictions fit the class after or before the label's far better than its own, by the mean
            share found of a class; 0 otherwise.

        Example:
            >>> SegmentationScores(tuple("abcd"), torch.eye(4).roll(1, 1).long() * 9).shift()
            1
        """
        if len(self.classes) < SHIFT_CLASSES:
            return 0
        rows = self.confusion / self.confusion.sum(1, keepdim=True).clamp_min(1)
        present = int((self.confusion.sum(1) > 0).sum())
        found = {k: float(rows.diagonal(k).sum()) / max(1, present) for k in (-1, 0, 1)}
        best = max((-1, 1), key=found.__getitem__)
        return best if found[best] > max(SHIFT_RECALL, SHIFT_TIMES * found[0]) else 0

    def _jaccard(self, average: Any) -> Tensor:
        from torchmetrics.classification import MulticlassJaccardIndex

        metric = MulticlassJaccardIndex(len(self.classes), average=average, validate_args=False, sync_on_compute=False)
        none = torch.zeros(0, dtype=torch.long)
        metric.update(none, none)  # or it warns that it has seen nothing
        metric.merge_state({"confmat": self.confusion})
        return metric.compute()
