"""Linear classification of whole photos: DINO's protocol over a grid of rates, and logistic regression."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.data.seeding import derived_seed
from selectivit.eval.fitting import NOT_KEPT, Keeping, fit
from selectivit.eval.knn import accuracies

DINO = {
    "name": "linear, SGD",
    "source": "DINO, arXiv 2104.14294, eval_linear.py: SGD of momentum 0.9 without weight decay, cosine to 0 by epoch",
    "chosen": "the best rate on the validation split, as DINO's 'max accuracy' is; every rate is listed",
}
LOGISTIC = {
    "name": "logistic regression",
    "source": "as scikit-learn's LogisticRegression: C * sum of losses + |W|²/2, L-BFGS; L2-normalised features",
    "chosen": "C on a tenth of the training photos held out, then fitted to all of them",
}
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
STRENGTHS = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)


@dataclass(frozen=True)
class SgdSettings:
    """How DINO's linear classifiers are trained.

    Args:
        epochs: passes over the photos.
        batch_size: photos a step.
        rates: learning rates for a batch of 256, each with a classifier of its own.
        seed: of the weights and the order.

    Raises:
        ValueError: a number that is too small.
    """

    epochs: int = 100
    batch_size: int = 1024
    rates: tuple[float, ...] = RATES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or not self.rates or min(self.rates) <= 0:
            raise ValueError(f"expected epochs and batches of 1 or more and rates above 0, got {self}")

    def steps_per_epoch(self, photos: int) -> int:
        """Batches an epoch, the last one smaller."""
        return -(-photos // self.batch_size)

    def factor(self, epoch: int) -> float:
        """What the rates are multiplied with in an epoch."""
        return (1 + math.cos(math.pi * epoch / self.epochs)) / 2


class _Heads(nn.Module):
    """Linear classifiers that see the same batches, one a rate."""

    def __init__(self, count: int, width: int, num_classes: int, seed: int):
        super().__init__()
        draw = torch.Generator().manual_seed(derived_seed(seed, "weights"))
        start = 0.01 * torch.randn(num_classes, width, generator=draw)
        self.weights = nn.ParameterList([nn.Parameter(start.clone()) for _ in range(count)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(num_classes)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """From (n, D) to logits (heads, n, K)."""
        return x @ torch.stack(list(self.weights)).transpose(1, 2) + torch.stack(list(self.biases))[:, None]


def sgd_probe(
    views: Callable[[int], tuple[Tensor, Tensor]],
    val: Tensor,
    val_labels: Tensor,
    num_classes: int,
    settings: SgdSettings,
    keeping: Keeping = NOT_KEPT,
    tell: Callable[[str | None], None] = lambda line: None,
) -> dict[str, Any]:
    """Train a linear classifier for each rate, all on the same batches.

    Args:
        views: epoch -> features (M, D) of one random view of each training photo, and labels (M,).
        val: (N, D).
        val_labels: (N,).
        num_classes: K.
        settings: how.
        keeping: where an unfinished training is kept.
        tell: called after each step.

    Returns:
        "rows": one a rate, with "lr", "top1", perhaps "top5"; and the "best" of them by top-1.

    Raises:
        ValueError: the loss of every rate is not finite.
    """
    x, _ = views(0)
    heads = _Heads(len(settings.rates), val.shape[1], num_classes, settings.seed).to(val.device)
    per_epoch = settings.steps_per_epoch(len(x))
    state: dict[str, Any] = {"epoch": -1}

    def loss_at(step: int) -> Tensor:
        epoch, place = divmod(step, per_epoch)
        if epoch != state["epoch"]:
            shuffle = torch.Generator().manual_seed(derived_seed(settings.seed, "order", epoch))
            features, labels = views(epoch)
            batches = torch.randperm(len(features), generator=shuffle).split(settings.batch_size)
            state.update(epoch=epoch, x=features, y=labels, batches=batches)
        pick = state["batches"][place]
        logits = heads(state["x"][pick].to(val.device))  # (rates, n, K)
        target = state["y"][pick].to(val.device).expand(len(logits), -1)
        losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(1)
        return losses.where(losses.isfinite(), 0).sum()  # a rate that is too high runs away alone

    scale = settings.batch_size / 256
    groups = [
        {"params": [w, b], "lr": lr * scale}
        for w, b, lr in zip(heads.weights, heads.biases, settings.rates, strict=True)
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    fit(
        heads,
        loss_at,
        optimizer,
        lambda step: settings.factor(step // per_epoch),
        settings.epochs * per_epoch,
        keeping,
        tell,
    )
    rows = []
    with torch.inference_mode():
        for lr, scores in zip(settings.rates, heads(val), strict=True):
            finite = bool(scores.isfinite().all())
            rows.append({"lr": lr, **(accuracies(scores, val_labels) if finite else {"top1": 0.0, "diverged": True})})
    return {"rows": rows, "best": max(rows, key=lambda row: row["top1"])}


def logistic_fit(x: Tensor, y: Tensor, num_classes: int, strength: float, steps: int = 500) -> tuple[Tensor, Tensor]:
    """Multinomial logistic regression.

    Args:
        x: (M, D).
        y: (M,), classes.
        num_classes: K.
        strength: scikit-learn's C: what a photo's loss counts beside half the squared weights.
        steps: of L-BFGS at most.

    Returns:
        Weights (K, D) and biases (K,).

    Raises:
        ValueError: a strength that is not positive, or features that are not finite.

    Example:
        >>> weights, biases = logistic_fit(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1]), 2, strength=1.0)
        >>> bool(weights[1] > weights[0])
        True
    """
    if not strength > 0:
        raise ValueError(f"expected --strength above 0, got {strength}")
    if not bool(x.isfinite().all()):
        raise ValueError("the features are not finite")
    weights = torch.zeros(num_classes, x.shape[1], dtype=x.dtype, device=x.device, requires_grad=True)
    biases = torch.zeros(num_classes, dtype=x.dtype, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, biases], max_iter=steps, tolerance_grad=1e-7, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(x, weights, biases), y) + weights.square().sum() / (2 * strength * len(x))
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach(), biases.detach()


def logistic_probe(
    train: Tensor,
    train_labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    num_classes: int,
    *,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
    tell: Callable[[str | None], None] = lambda line: None,
) -> dict[str, Any]:
    """Accuracy of logistic regression, its strength chosen on training photos alone.

    Args:
        train: (M, D).
        train_labels: (M,).
        val: (N, D).
        val_labels: (N,).
        num_classes: K.
        strengths: to choose from; one alone is taken as it is.
        seed: of the tenth that is held out.
        tell: called after each strength.

    Returns:
        "best": "c", "top1", perhaps "top5"; "held_out": accuracy on the held-out tenth for each strength.

    Raises:
        ValueError: as `logistic_fit`.
    """
    train, val = F.normalize(train), F.normalize(val)
    draw = torch.Generator().manual_seed(derived_seed(seed, "held out"))
    order = torch.randperm(len(train), generator=draw)
    held, kept = order[: max(1, len(order) // 10)], order[max(1, len(order) // 10) :]
    chosen, rows = strengths[0], []
    if len(strengths) > 1:
        for c in strengths:
            fitted = logistic_fit(train[kept], train_labels[kept], num_classes, c)
            rows.append({"c": c, **accuracies(F.linear(train[held], *fitted), train_labels[held])})
            tell(None)
        chosen = max(rows, key=lambda row: row["top1"])["c"]
    fitted = logistic_fit(train, train_labels, num_classes, chosen)
    tell(None)
    return {"held_out": rows, "best": {"c": chosen, **accuracies(F.linear(val, *fitted), val_labels)}}
