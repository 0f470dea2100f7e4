"""How close a student is to its teacher on photos that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from selectivit.train.pair import Pair
from selectivit.train.tokens import DenseTokens, to_grid


class Agreement:
    """Cosines of a student's and its teacher's tokens over fixed crops; the teacher sees them once.

    Args:
        crops: (3, size, size) uint8, of one size.
        batch_size: crops at once.

    Example:
        >>> Agreement([], 4).sums(None)
        tensor([0., 0., 0.], dtype=torch.float64)
    """

    def __init__(self, crops: Sequence[Tensor], batch_size: int):
        self.batches = [torch.stack(list(crops[i : i + batch_size])) for i in range(0, len(crops), batch_size)]
        self._taught: list[DenseTokens] = []

    def sums(
        self,
        pair: Pair | None,
        device: torch.device | None = None,
        num_cores: int | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Tensor:
        """Sums over the crops, for processes to add up.

        Args:
            pair: student and teacher; None only where there are no crops.
            device: where they are.
            num_cores: the student's budget.
            autocast: the precision to compute in.

        Returns:
            (3,) float64: global cosine, mean patch cosine, number of crops.
        """
        total = torch.zeros(3, dtype=torch.float64)
        for i, batch in enumerate(self.batches):
            assert pair is not None
            images = batch if device is None else batch.to(device)
            with pair.evaluating(), autocast():
                if i == len(self._taught):
                    self._taught.append(pair.teach(images))
                student = pair.study(images, num_cores)
                teacher = to_grid(self._taught[i], student.grid, pair.grid)
            whole = F.cosine_similarity(student.global_token.float(), teacher.global_token.float(), dim=-1)
            patches = F.cosine_similarity(student.patch_tokens.float(), teacher.patch_tokens.float(), dim=-1)
            total[:2] += torch.stack([whole.double().sum(), patches.double().mean(1).sum()]).cpu()
            total[2] += len(images)
        return total

    def means(self, pair: Pair, trainer: L.Trainer) -> dict[str, float]:
        """The means over the crops of all processes.

        Args:
            pair: student and teacher.
            trainer: Lightning's, for device, precision and processes.

        Returns:
            As `means` gives them.
        """
        device = trainer.strategy.root_device
        sums = self.sums(pair, device, autocast=trainer.precision_plugin.forward_context)
        if trainer.world_size > 1:
            shared = sums.to(device)
            dist.all_reduce(shared)
            sums = shared.cpu()
        return means(sums)


def means(sums: Tensor) -> dict[str, float]:
    """Turn sums, added over processes, into means.

    Args:
        sums: as `Agreement.sums` gives them.

    Returns:
        "global_cosine" and "patch_cosine"; empty without crops.

    Example:
        >>> means(torch.tensor([1.0, 0.5, 2.0]))
        {'global_cosine': 0.5, 'patch_cosine': 0.25}
    """
    whole, patches, count = sums.tolist()
    return {"global_cosine": whole / count, "patch_cosine": patches / count} if count else {}
