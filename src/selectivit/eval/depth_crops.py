"""DINOv2's linear-1 depth protocol: a head trained on random crops, scored on whole photos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selectivit.data.dense_crops import CropSettings
from selectivit.data.depth import DepthData
from selectivit.data.transforms import to_tensor
from selectivit.eval.crop_training import CropBatches, Crops, FrozenTokens
from selectivit.eval.depth import DepthHead, depth_loss, mean_only
from selectivit.eval.fitting import NOT_KEPT, FitSettings, Keeping, fit
from selectivit.features import preprocessing

DINOV2 = FitSettings(steps=38_400, lr=5e-3, weight_decay=1e-2, warmup=12_800, decay="cosine", batch_size=16)
CROP = (416, 544)
PROTOCOL = {
    "name": "DINOv2's linear-1 protocol",
    "head": "linear layer to 256 bins between the least and the most depth, scaled 4 times bilinearly, "
    "ReLU + 0.1 made shares",
    "training": "random crops, flips, colours; SigLoss + 0.5 gradient loss; AdamW 5e-3, warm-up of a third, cosine",
    "source": "DINOv2, arXiv 2304.07193; no random rotation here, and the gradient loss is over rows and columns",
    "scored": "whole photos in whole patches, depth scaled bilinearly to each map's own resolution, no flips; "
    "mean over photos",
}


def train_depth_on_crops(
    data: DepthData,
    front: FrozenTokens,
    crop: tuple[int, int],
    settings: FitSettings,
    seed: int,
    workers: int = 0,
    keeping: Keeping = NOT_KEPT,
    tell: Callable[[str | None], None] = lambda line: None,
) -> tuple[DepthHead, dict[str, str]]:
    """Train a head as DINOv2 does.

    Args:
        data: the training split.
        front: the frozen model.
        crop: (height, width) in pixels, whole patches.
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

    def read(index: int) -> tuple[Any, Tensor]:
        return data.image(index), data.depth(index)

    crops = Crops(len(data), read, data.name_of, CropSettings(crop, void=0), front.model, seed)
    batches = CropBatches(crops, settings.batch_size, settings.steps, workers)
    device = next(front.model.parameters()).device
    head = DepthHead(front(torch.zeros(1, 3, *crop)).shape[1], data.min_depth, data.max_depth, seed).to(device)

    def loss_at(step: int) -> Tensor:
        images, depths = batches(step)
        pairs = list(zip(head.at(front(images), crop), depths.to(device), strict=True))
        return depth_loss(pairs, mean_only(step, settings.steps))

    fit(head, loss_at, settings.optimizer(head), settings.factor, settings.steps, keeping, tell)
    return head, crops.problems


def whole_photo_depth(head: DepthHead, front: FrozenTokens, data: DepthData) -> Callable[[int, Tensor], Tensor | None]:
    """What `score_depth` asks, answered by the model on the whole photo at its own size, in whole patches.

    Args:
        head: in eval mode.
        front: the frozen model.
        data: the split.

    Returns:
        From a place and the measured depth to the predicted one.
    """
    expected = preprocessing(front.model)
    wanted = {"mean": expected.mean, "std": expected.std, "patch_size": expected.patch_size}

    def predict(index: int, depth: Tensor) -> Tensor | None:
        return head.at(front(to_tensor(data.image(index), **wanted)[None]), depth.shape)[0]

    return predict
