"""Segmentation by a linear layer on frozen patches: batch norm and a 1x1 convolution, scored at the masks' own size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.data.images import ImageError
from selectivit.data.seeding import derived_seed
from selectivit.data.segmentation import SegmentationData
from selectivit.eval.fitting import NOT_KEPT, FitSettings, Keeping, fit
from selectivit.eval.token_table import TokenTable

SAMPLES = 4
"""A patch's label is that of SAMPLES x SAMPLES pixels, evenly spaced in it."""

FAST = FitSettings(steps=1500, lr=3e-3, weight_decay=1e-4, warmup=150, decay="cosine", batch_size=4096)
PROTOCOL = {
    "name": "linear on cached features",
    "head": "batch norm + 1x1 convolution",
    "training": "whole photos, cached features, random patches; cross entropy with 4 x 4 pixels a patch",
    "source": "the head is that of DINOv2's linear segmentation (arXiv 2304.07193); the training is our own, quick one",
    "scored": "logits scaled bilinearly to each mask's own resolution; mIoU over all pixels of the split",
}


class DenseHead(nn.Sequential):
    """Batch norm and a linear layer over patches: (n, D) to (n, K).

    Args:
        width: D.
        num_classes: K.
        seed: of the weights.
    """

    def __init__(self, width: int, num_classes: int, seed: int):
        norm, linear = nn.BatchNorm1d(width), nn.Linear(width, num_classes)
        draw = torch.Generator().manual_seed(derived_seed(seed, "head"))
        with torch.no_grad():
            linear.weight.copy_(0.01 * torch.randn(num_classes, width, generator=draw))
            linear.bias.zero_()
        super().__init__(norm, linear)

    def logits(self, features: Tensor) -> Tensor:
        """From maps (B, D, h, w) to (B, K, h, w)."""
        batch, _, height, width = features.shape
        rows = self(features.permute(0, 2, 3, 1).flatten(0, 2))
        return rows.unflatten(0, (batch, height, width)).permute(0, 3, 1, 2)


def patch_labels(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """The labels of some pixels of each patch.

    Args:
        mask: (H, W), at its own resolution.
        grid: (h, w) in patches.

    Returns:
        (h * w, SAMPLES²), of the mask's dtype, row by row.

    Example:
        >>> patch_labels(torch.tensor([[0, 1], [2, 3]]), (1, 2))[0].unique()
        tensor([0, 2])
    """
    height, width = (SAMPLES * side for side in grid)
    ys = ((torch.arange(height) + 0.5) * mask.shape[0] / height).long()
    xs = ((torch.arange(width) + 0.5) * mask.shape[1] / width).long()
    sampled = mask[ys][:, xs].unflatten(0, (grid[0], SAMPLES)).unflatten(2, (grid[1], SAMPLES))  # (h, s, w, s)
    return sampled.transpose(1, 2).flatten(2).flatten(0, 1)


def soft_loss(logits: Tensor, labels: Tensor, void: int) -> Tensor:
    """Cross entropy over all labelled pixels of some patches.

    Args:
        logits: (n, K).
        labels: (n, s), classes, or `void`.
        void: the label that counts for nothing.

    Returns:
        Its mean over the pixels.

    Example:
        >>> soft_loss(torch.zeros(1, 2), torch.tensor([[0, 1, 255]]), 255)
        tensor(0.6931)
    """
    counts = labels != void
    found = logits.log_softmax(1).gather(1, labels.long().where(counts, 0))  # (n, s)
    return -(found * counts).sum() / counts.sum().clamp_min(1)


@dataclass(frozen=True)
class Scored:
    """What came out.

    Args:
        miou: mean over the classes that occur in labels or predictions, 0 … 1.
        iou: of each class by name; None where it occurs in neither.
        pixel_accuracy: share of labelled pixels that are right.
        photos: how many were scored.
    """

    miou: float
    iou: dict[str, float | None]
    pixel_accuracy: float
    photos: int


class Scores:
    """Intersections and unions, filled photo by photo.

    Args:
        classes: their names.
        void: the label that counts for nothing.
    """

    def __init__(self, classes: tuple[str, ...], void: int):
        from torchmetrics.classification import MulticlassJaccardIndex

        self.classes, self.photos = classes, 0
        self.metric = MulticlassJaccardIndex(len(classes), ignore_index=void, validate_args=False)

    def add(self, logits: Tensor, mask: Tensor) -> None:
        """Score one photo.

        Args:
            logits: (K, h, w), scaled to the mask's size.
            mask: (H, W).
        """
        large = F.interpolate(logits[None].float(), mask.shape, mode="bilinear", align_corners=False)
        self.metric.update(large.argmax(1).cpu(), mask[None].long())
        self.photos += 1

    def result(self) -> Scored:
        """What came out.

        Raises:
            ValueError: nothing was scored.
        """
        confusion = self.metric.confmat
        assert isinstance(confusion, Tensor)
        if not self.photos or not int(confusion.sum()):
            raise ValueError("no labelled pixel was scored: expected masks that are not all void")
        hits, union = confusion.diag(), confusion.sum(0) + confusion.sum(1) - confusion.diag()
        per_class = [None if not u else h / u for h, u in zip(hits.tolist(), union.tolist(), strict=True)]
        iou = dict(zip(self.classes, per_class, strict=True))
        return Scored(self.metric.compute().item(), iou, (hits.sum() / confusion.sum()).item(), self.photos)


class Labelled:
    """The masks of a split beside the cached tokens of its photos.

    Args:
        data: the split.
        tokens: of its photos.
    """

    def __init__(self, data: SegmentationData, tokens: TokenTable):
        self.data, self.tokens = data, tokens
        self.problems: dict[str, str] = {}

    def mask(self, index: int) -> Tensor | None:
        """One mask; None, and a note, where photo or mask cannot be used."""
        if not int(self.tokens.grids[index, 0]):
            return None
        try:
            return self.data.mask(index)
        except (ImageError, OSError) as error:
            self.problems[self.data.name_of(index)] = str(error)
            return None

    def patches(self) -> tuple[Tensor, Tensor]:
        """Rows of all patches with a labelled pixel, and their pixels' labels (n, SAMPLES²).

        Raises:
            ValueError: there is none.
        """
        rows, labels = [], []
        for index in range(len(self.data)):
            mask = self.mask(index)
            if mask is None:
                continue
            height, width = self.tokens.grids[index].tolist()
            found = patch_labels(mask, (height, width))
            counts = (found != self.data.ignore_index).any(1)
            rows.append(int(self.tokens.starts[index]) + counts.nonzero()[:, 0])
            labels.append(found[counts])
        if not sum(map(len, rows)):
            raise ValueError(
                f"no labelled pixel in the {len(self.data)} masks of split {self.data.split!r}: all are void"
            )
        return torch.cat(rows), torch.cat(labels)


def train_head(
    labelled: Labelled,
    settings: FitSettings,
    seed: int,
    device: torch.device,
    keeping: Keeping = NOT_KEPT,
    tell: Callable[[str | None], None] = lambda line: None,
) -> DenseHead:
    """Train a head on the cached patches of a split.

    Args:
        labelled: the training split.
        settings: how; a batch is of patches.
        seed: of weights and batches.
        device: where to train.
        keeping: where an unfinished training is kept.
        tell: called after each step.

    Returns:
        The head, in eval mode.

    Raises:
        ValueError: no labelled pixel.
    """
    rows, labels = labelled.patches()
    data, tokens = labelled.data, labelled.tokens
    head = DenseHead(tokens.width, len(data.classes), seed).to(device)

    def loss_at(step: int) -> Tensor:
        draw = torch.Generator().manual_seed(derived_seed(seed, "patches", step))
        pick = torch.randint(len(rows), (settings.batch_size,), generator=draw)
        return soft_loss(head(tokens.rows(rows[pick]).to(device)), labels[pick].to(device), data.ignore_index)

    fit(head, loss_at, settings.optimizer(head), settings.factor, settings.steps, keeping, tell)
    return head


@torch.inference_mode()
def score_head(
    head: DenseHead, labelled: Labelled, device: torch.device, tell: Callable[[str | None], None] = lambda line: None
) -> Scored:
    """Score a head on a split, at the masks' own resolution.

    Args:
        head: in eval mode.
        labelled: the split.
        device: where the head is.
        tell: called after each photo.

    Returns:
        What came out.

    Raises:
        ValueError: no labelled pixel.
    """
    scores = Scores(labelled.data.classes, labelled.data.ignore_index)
    for index in range(len(labelled.data)):
        mask = labelled.mask(index)
        if mask is not None:
            scores.add(head.logits(labelled.tokens.photo(index)[None].to(device))[0], mask)
        tell(None)
    return scores.result()


def report(found: Scored) -> dict[str, Any]:
    """The numbers as JSON holds them."""
    return {
        "miou": found.miou,
        "pixel_accuracy": found.pixel_accuracy,
        "photos": found.photos,
        "iou": found.iou,
    }
