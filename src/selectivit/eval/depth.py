"""Depth by a linear layer on frozen patches: 256 bins, scored at the depth maps' own size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.data.depth import DepthData
from selectivit.data.images import ImageError
from selectivit.data.seeding import derived_seed
from selectivit.eval.depth_metrics import depth_metrics, mean_metrics
from selectivit.eval.fitting import NOT_KEPT, FitSettings, Keeping, fit
from selectivit.eval.token_table import TokenTable

BINS = 256
EPS = 1e-3
MEAN_ONLY_STEPS = 100
"""So many steps, a tenth of all at most, the loss looks at the mean of the log error alone: at first its variance says
nothing."""

FAST = FitSettings(steps=1000, lr=5e-3, weight_decay=1e-2, warmup=100, decay="cosine", batch_size=4)
PROTOCOL = {
    "name": "linear-1 on cached features",
    "head": "linear layer to 256 bins between the least and the most depth, scaled 4 times bilinearly, "
    "ReLU + 0.1 made shares",
    "training": "whole photos, cached features; SigLoss + 0.5 gradient loss at the maps' own resolution",
    "source": "DINOv2's linear-1 depth (arXiv 2304.07193): its head and losses; the training is our own, quick one",
    "scored": "whole photos, depth scaled bilinearly to each map's own resolution, no flips; mean over photos",
}


class DepthHead(nn.Module):
    """Depth as the mean of 256 even bins, weighted by a linear layer of the patch.

    Args:
        width: D, numbers a patch.
        min_depth: metres, the first bin.
        max_depth: metres, the last bin.
        seed: of the weights.

    Example:
        >>> DepthHead(8, 0.001, 10.0, seed=0)(torch.randn(1, 8, 3, 4)).shape
        torch.Size([1, 12, 16])

    Source: AdaBins' normalisation, arXiv 2011.14141, as DINOv2's linear head uses it, arXiv 2304.07193.
    """

    bins: Tensor

    def __init__(self, width: int, min_depth: float, max_depth: float, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(seed, "head"))
            self.linear = nn.Linear(width, BINS)
        self.register_buffer("bins", torch.linspace(min_depth, max_depth, BINS))

    def forward(self, features: Tensor) -> Tensor:
        """From maps (B, D, h, w) to depth (B, 4 h, 4 w), metres."""
        logits = self.linear(features.movedim(1, 3)).movedim(3, 1)  # (B, bins, h, w)
        # The linear layer before the scaling: they commute, and this is a sixteenth of the work.
        shares = F.interpolate(logits, scale_factor=4, mode="bilinear", align_corners=False).relu() + 0.1
        return torch.einsum("bkhw,k->bhw", shares / shares.sum(1, keepdim=True), self.bins)

    def at(self, features: Tensor, size: Sequence[int]) -> Tensor:
        """From maps (B, D, h, w) to depth (B, H, W) of a size, metres."""
        depth = self(features)[:, None]
        return F.interpolate(depth, (size[0], size[1]), mode="bilinear", align_corners=False)[:, 0]


def sig_loss(pairs: Sequence[tuple[Tensor, Tensor]], mean_only: bool = False) -> Tensor:
    """Scale-invariant loss of log depth, over the measured pixels of all photos of a batch.

    Args:
        pairs: depth predicted and measured, (H, W) each, metres; 0 is not measured.
        mean_only: leave out the variance, as in the first steps.

    Returns:
        sqrt(var(g) + 0.15 mean(g)²) with g the difference of logarithms.

    Example:
        >>> depth = torch.tensor([[1.0, 2.0, 0.0]])
        >>> bool(sig_loss([(depth + 0.5, depth)]) > sig_loss([(depth + 0.1, depth)]))
        True

    Source: arXiv 2011.14141, with DINOv2's constants.
    """
    g = torch.cat([(p[d > 0] + EPS).log() - (d[d > 0] + EPS).log() for p, d in pairs])
    squared = 0.15 * g.mean().square()
    # A root has no slope at 0.
    return (squared if mean_only else squared + g.var()).clamp_min(1e-12).sqrt()


def gradient_loss(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Differences of the log error between pixels two apart, at four scales.

    Args:
        pairs: as for `sig_loss`.

    Returns:
        The sum over the scales of the mean over the measured pixels.

    Example:
        >>> depth = torch.rand(8, 8) + 1
        >>> round(gradient_loss([(2 * depth, depth)]).item(), 2)  # a common factor costs nothing
        0.0

    Source: MegaDepth, arXiv 1804.00607, over rows and columns of each photo.
    """
    total = torch.zeros((), device=pairs[0][0].device)
    for step in (1, 2, 4, 6):
        sums, count = torch.zeros_like(total), 0
        for predicted, depth in pairs:
            p, d = predicted[::step, ::step], depth[::step, ::step]
            seen = d > 0
            error = ((p + EPS).log() - (d + EPS).log()) * seen
            for dim in (0, 1):
                length = max(0, error.shape[dim] - 2)
                both = seen.narrow(dim, 0, length) & seen.narrow(dim, error.shape[dim] - length, length)
                change = error.narrow(dim, 0, length) - error.narrow(dim, error.shape[dim] - length, length)
                sums = sums + (change.abs() * both).sum()
            count = count + seen.sum()
        total = total + sums / torch.as_tensor(count).clamp_min(1)
    return total


def mean_only(step: int, steps: int) -> bool:
    """Whether the loss of a step leaves the variance out."""
    return step < min(MEAN_ONLY_STEPS, steps // 10)


def depth_loss(pairs: Sequence[tuple[Tensor, Tensor]], mean_only: bool = False) -> Tensor:
    """The loss of a step: SigLoss and half the gradient loss.

    Args:
        pairs: as for `sig_loss`; photos without a measured pixel do no harm.
        mean_only: as for `sig_loss`.

    Returns:
        The loss; 0 where nothing is measured.
    """
    seen = [(p, d) for p, d in pairs if int((d > 0).sum()) > 1]
    if not seen:
        return sum((p.sum() * 0 for p, _ in pairs), torch.zeros(()))
    return sig_loss(seen, mean_only) + 0.5 * gradient_loss(seen)


def train_depth_head(
    data: DepthData,
    tokens: TokenTable,
    settings: FitSettings,
    seed: int,
    device: torch.device,
    keeping: Keeping = NOT_KEPT,
    tell: Callable[[str | None], None] = lambda line: None,
) -> tuple[DepthHead, dict[str, str]]:
    """Train a head on the cached features of a split.

    Args:
        data: the training split.
        tokens: of its photos.
        settings: how; a batch is of photos.
        seed: of weights and batches.
        device: where to train.
        keeping: where an unfinished training is kept.
        tell: called after each step.

    Returns:
        The head in eval mode, and what could not be read.

    Raises:
        ValueError: no photo can be used.
    """
    usable = [i for i in range(len(data)) if int(tokens.grids[i, 0])]
    problems: dict[str, str] = {}
    head = DepthHead(tokens.width, data.min_depth, data.max_depth, seed).to(device)

    def pair(index: int) -> tuple[Tensor, Tensor] | None:
        if data.name_of(index) in problems:
            return None
        try:
            depth = data.depth(index).to(device)
        except (ImageError, OSError) as error:
            problems[data.name_of(index)] = str(error)
            return None
        return head.at(tokens.photo(index)[None].to(device), depth.shape)[0], depth

    def loss_at(step: int) -> Tensor:
        draw = torch.Generator().manual_seed(derived_seed(seed, "photos", step))
        picked = [usable[i] for i in torch.randint(len(usable), (settings.batch_size,), generator=draw).tolist()]
        pairs = [found for found in map(pair, picked) if found is not None]
        if not pairs and len(problems) == len(usable):
            last = next(reversed(problems.values()))
            raise ValueError(f"none of the {len(usable)} photos has a depth map that can be used; the last: {last}")
        return depth_loss(pairs, mean_only(step, settings.steps)) if pairs else head.linear.weight.sum() * 0

    fit(head, loss_at, settings.optimizer(head), settings.factor, settings.steps, keeping, tell)
    return head, problems


@torch.inference_mode()
def score_depth(
    data: DepthData,
    predict: Callable[[int, Tensor], Tensor | None],
    crop: str,
    tell: Callable[[str | None], None] = lambda line: None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Score predicted depth on a split.

    Args:
        data: the split.
        predict: place and measured depth (H, W) -> predicted depth (H, W), or None where the photo cannot be used.
        crop: a name of `depth_metrics.CROPS`.
        tell: called after each photo.

    Returns:
        The means over photos with "photos", their number; and what could not be read.

    Raises:
        ValueError: no photo could be scored.
    """
    found, problems = [], {}
    for index in range(len(data)):
        try:
            depth = data.depth(index)
            predicted = predict(index, depth)
        except (ImageError, OSError) as error:
            problems[data.name_of(index)] = str(error)
        else:
            scored = None
            if predicted is not None:
                scored = depth_metrics(predicted.cpu().clamp(data.min_depth, data.max_depth), depth, crop)
                if scored is None:
                    problems[data.name_of(index)] = f"no measured pixel inside the crop {crop!r}"
            if scored is not None:
                found.append(scored)
        tell(None)
    if not found and problems:
        raise ValueError(f"no photo could be scored; the last: {next(reversed(problems.values()))}")
    return {**mean_metrics(found), "photos": len(found)}, problems


def cached_depth(head: DepthHead, tokens: TokenTable, device: torch.device) -> Callable[[int, Tensor], Tensor | None]:
    """What `score_depth` asks, answered from cached features.

    Args:
        head: in eval mode.
        tokens: of the photos.
        device: where the head is.

    Returns:
        From a place and the measured depth to the predicted one.
    """

    def predict(index: int, depth: Tensor) -> Tensor | None:
        if not int(tokens.grids[index, 0]):
            return None
        return head.at(tokens.photo(index)[None].to(device), depth.shape)[0]

    return predict
