"""DINOv2's linear segmentation protocol: a head trained on random crops, scored by sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selectivit.data.dense_crops import CropSettings
from selectivit.data.images import ImageError
from selectivit.data.segmentation import SegmentationData
from selectivit.data.transforms import to_tensor
from selectivit.eval.crop_training import CropBatches, Crops, FrozenTokens, slide
from selectivit.eval.fitting import NOT_KEPT, FitSettings, Keeping, fit
from selectivit.eval.segmentation import DenseHead, Scored, Scores
from selectivit.features import preprocessing

DINOV2 = FitSettings(steps=40_000, lr=1e-3, weight_decay=1e-4, warmup=1500, decay="linear", batch_size=16)
CROP = 512
PROTOCOL = {
    "name": "DINOv2's linear protocol",
    "head": "batch norm + 1x1 convolution",
    "training": "random crops, scale 0.5 to 2, flips, colours; AdamW, linear warm-up and decay",
    "source": "DINOv2, arXiv 2304.07193, on MMSegmentation's training and sliding inference",
    "scored": "sliding windows 2/3 apart; logits scaled to each mask's own resolution; mIoU over all pixels",
}


def crop_of_whole_patches(patch_size: int, size: int = CROP) -> int:
    """The crop in whole patches that is nearest to the published one.

    Args:
        patch_size: side of a patch, pixels.
        size: of the published crop.

    Returns:
        Pixels.

    Example:
        >>> crop_of_whole_patches(16), crop_of_whole_patches(14)
        (512, 518)
    """
    return max(1, round(size / patch_size)) * patch_size


def train_on_crops(
    data: SegmentationData,
    front: FrozenTokens,
    crop: int,
    settings: FitSettings,
    seed: int,
    workers: int = 0,
    keeping: Keeping = NOT_KEPT,
    tell: Callable[[str | None], None] = lambda line: None,
) -> tuple[DenseHead, dict[str, str]]:
    """Train a head as DINOv2 does.

    Args:
        data: the training split.
        front: the frozen model.
        crop: side of a crop, pixels, in whole patches.
        settings: how; a batch is of crops.
        seed: of everything that is drawn.
        workers: processes that read photos.
        keeping: where an unfinished training is kept.
        tell: called after each step.

    Returns:
        The head in eval mode, and what could not be read (known where `workers` is 0).

    Raises:
        ValueError: a crop that does not fit the model's patches.
    """
    cut = CropSettings((crop, crop), (0.5, 2.0), shorter=crop, most=0.75, void=data.ignore_index)

    def read(index: int) -> tuple[Any, Tensor]:
        return data.image(index), data.mask(index)

    crops = Crops(len(data), read, data.name_of, cut, front.model, seed)
    batches = CropBatches(crops, settings.batch_size, settings.steps, workers)
    device = next(front.model.parameters()).device
    width = front(torch.zeros(1, 3, crop, crop)).shape[1]
    head = DenseHead(width, len(data.classes), seed).to(device)

    def loss_at(step: int) -> Tensor:
        images, masks = batches(step)
        logits = F.interpolate(head.logits(front(images)), (crop, crop), mode="bilinear", align_corners=False)
        masks = masks.long().to(device)
        losses = F.cross_entropy(logits, masks, ignore_index=data.ignore_index, reduction="sum")
        return losses / (masks != data.ignore_index).sum().clamp_min(1)

    fit(head, loss_at, settings.optimizer(head), settings.factor, settings.steps, keeping, tell)
    return head, crops.problems


@torch.inference_mode()
def score_sliding(
    head: DenseHead,
    data: SegmentationData,
    front: FrozenTokens,
    crop: int,
    batch_size: int,
    tell: Callable[[str | None], None] = lambda line: None,
) -> tuple[Scored, dict[str, str]]:
    """Score a head by windows that slide over the photo, whose shorter side is scaled to the window's.

    Args:
        head: in eval mode.
        data: the split.
        front: the frozen model.
        crop: side of a window, pixels.
        batch_size: windows computed at once.
        tell: called after each photo.

    Returns:
        What came out, and what could not be read.

    Raises:
        ValueError: no labelled pixel.
    """
    expected = preprocessing(front.model)
    wanted = {"mean": expected.mean, "std": expected.std, "patch_size": expected.patch_size, "size": crop}
    scores, problems = Scores(data.classes, data.ignore_index), {}

    def logits(part: Tensor) -> Tensor:
        return F.interpolate(head.logits(front(part)), (crop, crop), mode="bilinear", align_corners=False)

    for index in range(len(data)):
        try:
            image, mask = to_tensor(data.image(index), **wanted), data.mask(index)
        except (ImageError, OSError) as error:
            problems[data.name_of(index)] = str(error)
        else:
            stride = max(1, crop * 341 // 512)
            scores.add(slide(image, logits, (crop, crop), (stride, stride), batch_size), mask)
        tell(None)
    return scores.result(), problems
