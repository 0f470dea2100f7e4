"""k-NN classification of photos kept out of training, on the teacher's class tokens."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightly.utils.benchmarking.knn import knn_predict
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from selectivit.data.classes import LabelledCrops, collate_labelled
from selectivit.train.dino_pair import DinoPair
from selectivit.train.loader import quiet_worker

QUERIES_AT_ONCE = 256


class Neighbours:
    """A weighted k-NN between labelled photos of the training and others that were kept out of it.

    Args:
        bank: the photos among which neighbours are looked for.
        queries: the photos that are classified.
        k: neighbours.
        temperature: of their votes, exp(cos / temperature).
        batch_size: photos at once.
        workers: processes that read photos.

    Source: DINO, arXiv 2104.14294: k = 20, temperature 0.07.
    """

    def __init__(
        self, bank: LabelledCrops, queries: LabelledCrops, k: int, temperature: float, batch_size: int, workers: int
    ):
        self.bank, self.queries, self.k, self.temperature = bank, queries, k, temperature
        self.batch_size, self.workers = batch_size, workers
        self.classes = 1 + max([*bank.labels, *queries.labels])

    def accuracy(self, pair: DinoPair, trainer: L.Trainer) -> dict[str, float]:
        """Classify; in all processes, each with its share of the photos.

        Args:
            pair: whose teacher is judged.
            trainer: Lightning's, for device, precision and processes.

        Returns:
            "knn_top1": the share of queries that is right; empty where no photo can be read.
        """
        (bank, known), (queries, wanted) = (self._features(part, pair, trainer) for part in (self.bank, self.queries))
        if not len(known) or not len(wanted):
            return {}
        return {"knn_top1": knn_accuracy(bank, known, queries, wanted, self.classes, self.k, self.temperature)}

    def _features(self, photos: LabelledCrops, pair: DinoPair, trainer: L.Trainer) -> tuple[Tensor, Tensor]:
        """Unit class tokens (n, C) float32 and classes (n,) of all processes' photos, on the CPU."""
        share = Subset(photos, range(trainer.global_rank, len(photos), trainer.world_size))
        loader = DataLoader(
            share,
            self.batch_size,
            num_workers=min(self.workers, len(share)),
            collate_fn=collate_labelled,
            worker_init_fn=quiet_worker,
        )
        tokens, labels = [], []
        for batch in loader:
            if batch is not None:
                with trainer.precision_plugin.forward_context():
                    found = pair.represent(batch[0].to(trainer.strategy.root_device))
                tokens.append(F.normalize(found.float(), dim=-1).cpu())
                labels.append(batch[1])
        width = pair.teacher.embed_dim
        mine: tuple[Tensor, Tensor] = (
            torch.cat(tokens) if tokens else torch.zeros(0, width),  # pyright: ignore[reportArgumentType, reportCallIssue]
            torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int64),
        )
        parts: list[Any] = [mine]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            dist.all_gather_object(parts, mine)
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def knn_accuracy(
    bank: Tensor, known: Tensor, queries: Tensor, wanted: Tensor, classes: int, k: int, temperature: float
) -> float:
    """The share of queries whose class their weighted neighbours tell.

    Args:
        bank: (N, C), unit vectors.
        known: (N,), their classes.
        queries: (Q, C), unit vectors.
        wanted: (Q,), their classes.
        classes: how many there are.
        k: neighbours; all of the bank where it is smaller.
        temperature: of their votes.

    Returns:
        0 to 1.

    Example:
        >>> corners = torch.eye(3)
        >>> knn_accuracy(corners, torch.tensor([0, 1, 2]), corners, torch.tensor([0, 1, 0]), 3, 1, 0.07)
        0.6666666666666666
    """
    right = 0
    for tokens, labels in zip(queries.split(QUERIES_AT_ONCE), wanted.split(QUERIES_AT_ONCE), strict=True):
        told = knn_predict(tokens, bank.T, known, classes, min(k, len(known)), temperature)
        right += int((told[:, 0] == labels).sum())
    return right / len(wanted)
