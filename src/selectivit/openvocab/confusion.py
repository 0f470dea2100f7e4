"""What a segmenter took each labelled pixel for, and the mean IoU of that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from selectivit.openvocab.segmenter import OpenVocabularySegmenter

UNLABELLED = 255


def confusion(segmenter: OpenVocabularySegmenter, image: Any, mask: Tensor) -> Tensor:
    """Segment a photo and count, for each true class, what its pixels were taken for.

    Args:
        segmenter: with the classes of the mask, in their order.
        image: as the segmenter takes it.
        mask: (H, W) at the photo's size, classes from 0, `UNLABELLED` where none is known.

    Returns:
        (K, K) int64, rows the true classes.

    Raises:
        ValueError: a mask of another size, or of classes that the segmenter does not have.
    """
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    count = len(segmenter.labels)
    found, mask = segmenter(image).index_map.long(), mask.long().cpu()
    if found.shape != mask.shape:
        raise ValueError(f"the photo is {tuple(found.shape)} px (height, width) and its mask {tuple(mask.shape)}")
    check_classes(mask, count)
    return multiclass_confusion_matrix(found, mask, count, ignore_index=UNLABELLED, validate_args=False)


def check_classes(mask: Tensor, count: int) -> None:
    """Refuse a mask with classes that are not in the list.

    Args:
        mask: of classes from 0, `UNLABELLED` where none is known.
        count: how many classes there are.

    Raises:
        ValueError: the mask holds others; the text names some.

    Example:
        >>> check_classes(torch.tensor([[0, 1, 255]]), 2)
    """
    outside = [number for number in mask.unique().tolist() if number != UNLABELLED and not 0 <= number < count]
    if outside:
        shown = ", ".join(map(str, outside[:5]))
        raise ValueError(
            f"the mask holds {shown}, the classes are 0 to {count - 1} ({UNLABELLED} is no class): give the class list "
            "that the masks were made with"
        )


def class_iou(counts: Tensor) -> Tensor:
    """Intersection over union of each class.

    Args:
        counts: (K, K), rows the true classes.

    Returns:
        (K,) float64; NaN for a class that is neither there nor found.

    Example:
        >>> class_iou(torch.tensor([[6, 0, 0], [2, 2, 0], [0, 0, 0]]))
        tensor([0.7500, 0.5000,    nan], dtype=torch.float64)
    """
    counts = counts.double()
    right = counts.diagonal()
    return right / (counts.sum(0) + counts.sum(1) - right)


def mean_iou(counts: Tensor) -> float:
    """The mean IoU over the classes that are there or were found.

    Args:
        counts: (K, K), rows the true classes.

    Returns:
        The mean, 0..1; NaN where no pixel was counted.

    Example:
        >>> mean_iou(torch.tensor([[6, 0, 0], [2, 2, 0], [0, 0, 0]]))
        0.625
    """
    return class_iou(counts).nanmean().item()
