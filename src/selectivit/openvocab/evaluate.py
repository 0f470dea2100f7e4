"""Score segmentation by words on a data set with masks, at the labels' own resolution."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

try:
    from torchmetrics.functional.classification import multiclass_confusion_matrix
except ModuleNotFoundError as error:
    raise ImportError(f"scores need torchmetrics ({error}): pip install 'selectivit[eval]'") from error

from selectivit.data.images import ImageError
from selectivit.data.segmentation import SegmentationData
from selectivit.openvocab.presets import Preset
from selectivit.openvocab.published import preset_for
from selectivit.openvocab.scores import SegmentationScores
from selectivit.openvocab.segmenter import BACKGROUND, OpenVocabularySegmenter

BACKGROUNDS = ("both", "words", "below")


def segmenter_for(
    clip: str | os.PathLike[str] | tuple[nn.Module, Any],
    data: SegmentationData,
    preset: str | Preset = "entmax-qq",
    *,
    background: str = "both",
    threshold: float | None = None,
    templates: str | Sequence[str] | None = None,
    refine: bool = False,
    device: str | torch.device | None = None,
) -> OpenVocabularySegmenter:
    """A segmenter for the classes of a data set, with the words and the background that its class list has.

    Args:
        clip: as for `OpenVocabularySegmenter`.
        data: whose classes are looked for.
        preset: a name, with what was published for this data set, or a `Preset` as it is.
        background: of data sets whose first class is background: "words", pixels that resemble the list's words for it
            most; "below", pixels below the threshold; "both".
        threshold: probability below which a pixel is background, in place of the preset's.
        templates: as for `OpenVocabularySegmenter`.
        refine: as for `OpenVocabularySegmenter`.
        device: as for `OpenVocabularySegmenter`.

    Returns:
        The segmenter; its index i is the data set's class i.

    Raises:
        ValueError: classes without names, an unknown preset or background, a threshold where there is no background.
    """
    if background not in BACKGROUNDS:
        raise ValueError(f"expected background {', '.join(BACKGROUNDS)}, got {background!r}")
    if all(name.isdecimal() for name in data.classes):
        raise ValueError(
            f"the classes of {data.name} are mere numbers: say what the ids mean by a classes.json in its folder"
        )
    preset = preset_for(preset, data.layout)
    labels, ground = ["|".join(words) for words in data.words], False
    if _has_background(data):
        labels, ground = labels[1:], True if background == "below" else list(data.words[0])
        if background != "words" and threshold is None:
            threshold = preset.threshold
    elif threshold is not None:
        raise ValueError(f"{data.name} ({data.layout}) has no background class that a threshold could fill")
    options: dict[str, Any] = {"templates": templates, "refine": refine, "device": device}
    return OpenVocabularySegmenter(clip, labels, preset, background=ground, threshold=threshold, **options)


def _has_background(data: SegmentationData) -> bool:
    return data.classes[0].casefold() == BACKGROUND


def check_fits(segmenter: OpenVocabularySegmenter, data: SegmentationData) -> None:
    """Refuse a segmenter whose classes are not those of the masks.

    Args:
        segmenter: of any words.
        data: with its classes.

    Raises:
        ValueError: another number of classes, or background in one of them alone.
    """
    if len(segmenter.labels) != len(data.classes) or segmenter.has_background != _has_background(data):
        kinds = [
            f"{len(names)} classes, {'with' if has else 'without'} background"
            for names, has in ((data.classes, _has_background(data)), (segmenter.labels, segmenter.has_background))
        ]
        raise ValueError(
            f"the masks have {kinds[0]}, the segmenter {kinds[1]}: its class i must be the data set's class i; "
            "segmenter_for(clip, data) makes one that fits"
        )


class _Reads(Dataset[Any]):
    """Picture and mask by number, or the error."""

    def __init__(self, data: SegmentationData, numbers: Sequence[int]):
        self.data, self.numbers = data, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> tuple[int, Any, Any]:
        number = self.numbers[place]
        try:
            return number, self.data.image(number), self.data.mask(number)
        except (ImageError, OSError) as error:
            return number, None, error


def read_ahead(
    data: SegmentationData, numbers: Sequence[int], workers: int = 0
) -> Iterator[tuple[int, Any, Tensor | Exception]]:
    """Read pictures and masks, in other processes where asked for.

    Args:
        data: the data set.
        numbers: which of its pictures.
        workers: processes that read; 0 reads here.

    Yields:
        The number, the picture and its mask; or None and the error.
    """
    yield from DataLoader(_Reads(data, numbers), batch_size=None, num_workers=workers, worker_init_fn=_quiet)


def _quiet(_: int) -> None:
    """Ctrl-C reaches the whole group of processes; the main one ends the readers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def count_confusion(found: Tensor, mask: Tensor, classes: int) -> Tensor:
    """How often each class of a mask was taken for each class.

    Args:
        found: (H, W), class indices.
        mask: (H, W), class indices, 255 for void.
        classes: how many there are.

    Returns:
        (classes, classes) int64; rows are the mask's.

    Example:
        >>> count_confusion(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 255]]), 2).tolist()
        [[1, 1], [0, 0]]
    """
    return multiclass_confusion_matrix(
        found.long(), mask.long(), num_classes=classes, ignore_index=255, validate_args=False
    )


def evaluate_segmentation(
    segmenter: OpenVocabularySegmenter,
    data: SegmentationData,
    *,
    numbers: Sequence[int] | None = None,
    workers: int = 0,
    tell: Callable[[int], None] | None = None,
) -> SegmentationScores:
    """Segment a data set's pictures and compare with its masks, pixel by pixel at the masks' own resolution.

    Args:
        segmenter: whose class i is the data set's class i, as `segmenter_for` makes it.
        data: what `open_segmentation` gives.
        numbers: which of its pictures; None is all.
        workers: processes that read pictures.
        tell: called with the number of each picture that is done.

    Returns:
        The scores over all pixels together, those of void left out.

    Raises:
        ValueError: a segmenter with other classes.
        ImageError: a picture or a mask that cannot be used.

    Example:
        >>> from selectivit.data.segmentation import open_segmentation  # doctest: +SKIP
        >>> data = open_segmentation("VOCdevkit/VOC2012", "voc20")  # doctest: +SKIP
        >>> evaluate_segmentation(segmenter_for("ViT-B-16/openai", data, "sclip"), data).miou  # doctest: +SKIP
    """
    check_fits(segmenter, data)
    total = torch.zeros(len(data.classes), len(data.classes), dtype=torch.long)
    for number, image, mask in read_ahead(data, range(len(data)) if numbers is None else numbers, workers):
        if isinstance(mask, Exception):
            raise mask
        total += count_confusion(segmenter.index_map(image), mask, len(data.classes))
        if tell is not None:
            tell(number)
    return SegmentationScores(data.classes, total)
