"""Weighted k nearest neighbours, as DINO judges features: no training at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PROTOCOL = {
    "name": "weighted k-NN",
    "source": "DINO, arXiv 2104.14294, eval_knn.py: cosine similarity s, votes exp(s / 0.07)",
}


def knn_votes(
    bank: Tensor, labels: Tensor, queries: Tensor, *, ks: Sequence[int], temperature: float, num_classes: int
) -> list[Tensor]:
    """Let the nearest neighbours of each query vote.

    Args:
        bank: (M, D), of any length: rows are normalised.
        labels: (M,), classes of the bank.
        queries: (N, D).
        ks: how many neighbours; each gives its own votes.
        temperature: a neighbour of cosine similarity s has exp(s / temperature) votes.
        num_classes: K.

    Returns:
        For each k the (N, K) votes.

    Raises:
        ValueError: no neighbours, more than the bank holds, or a temperature that is not positive.

    Example:
        >>> bank, queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 1.0]])
        >>> knn_votes(bank, torch.tensor([4, 2]), queries, ks=[1], temperature=0.07, num_classes=5)[0].argmax(1)
        tensor([4])

    Source: DINO, arXiv 2104.14294.
    """
    if not ks or min(ks) < 1 or max(ks) > len(bank):
        raise ValueError(f"expected --k of 1 to the {len(bank)} training photos, got {list(ks)}")
    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    bank, queries = F.normalize(bank.float()), F.normalize(queries.float())
    votes: list[list[Tensor]] = [[] for _ in ks]
    for chunk in queries.split(max(1, 2**26 // len(bank))):  # at most 256 MB of similarities
        similarity, nearest = (chunk @ bank.t()).topk(max(ks))  # (n, k)
        weights = ((similarity - 1) / temperature).exp()  # the common factor keeps small temperatures finite
        classes = labels[nearest]
        for k, parts in zip(ks, votes, strict=True):
            empty = torch.zeros(len(chunk), num_classes, device=bank.device)
            parts.append(empty.scatter_add(1, classes[:, :k], weights[:, :k]))
    return [torch.cat(parts) for parts in votes]


def knn_probe(
    train: Tensor,
    train_labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    *,
    ks: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.07,
    num_classes: int,
) -> dict[str, Any]:
    """Top-1 and top-5 accuracy of weighted k-NN.

    Args:
        train: (M, D).
        train_labels: (M,).
        val: (N, D).
        val_labels: (N,).
        ks: as for `knn_votes`; those above M are left out.
        temperature: as for `knn_votes`.
        num_classes: K.

    Returns:
        "rows": one a k, with "k", "top1" and, of five or more classes, "top5" in 0 … 1.

    Raises:
        ValueError: as `knn_votes`.

    Example:
        >>> x, y = torch.eye(3), torch.arange(3)
        >>> knn_probe(x, y, x, y, ks=[1], num_classes=3)
        {'rows': [{'k': 1, 'top1': 1.0}]}
    """
    kept = [k for k in ks if k <= len(train)]
    votes = knn_votes(train, train_labels, val, ks=kept or ks, temperature=temperature, num_classes=num_classes)
    rows = [{"k": k, **accuracies(v, val_labels)} for k, v in zip(kept, votes, strict=True)]
    return {"rows": rows, **({"left_out_k": [k for k in ks if k not in kept]} if len(kept) < len(ks) else {})}


def accuracies(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Top-1 and, of five or more classes, top-5 accuracy.

    Args:
        scores: (N, K), the highest is the answer.
        labels: (N,).

    Returns:
        "top1" and perhaps "top5", 0 … 1.
    """
    from torchmetrics.functional.classification import multiclass_accuracy

    options = {"num_classes": scores.shape[1], "average": "micro"}
    found = {"top1": multiclass_accuracy(scores, labels, **options).item()}
    if scores.shape[1] >= 5:
        found["top5"] = multiclass_accuracy(scores, labels, top_k=5, **options).item()
    return found
