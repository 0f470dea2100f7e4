"""How far a student's features are from a teacher's: cosine of the global token, cosine and square of the patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selectivit.train.tokens import DenseTokens


@dataclass(frozen=True)
class LossWeights:
    """What each part counts.

    Args:
        global_cosine: of 1 − cos of the global tokens.
        patch_cosine: of the mean over patches of 1 − cos.
        patch_mse: of the mean squared difference of the patches.

    Raises:
        ValueError: a negative weight, or none above 0.
    """

    global_cosine: float = 1.0
    patch_cosine: float = 1.0
    patch_mse: float = 1.0

    def __post_init__(self) -> None:
        weights = (self.global_cosine, self.patch_cosine, self.patch_mse)
        if min(weights) < 0 or max(weights) == 0:
            raise ValueError(f"expected weights of losses of 0 or more, one above 0, got {weights}")


def distillation_losses(student: DenseTokens, teacher: DenseTokens, weights: LossWeights) -> dict[str, Tensor]:
    """The losses in float32, also under autocast; gradients reach the student alone.

    Args:
        student: (B, C) and (B, N, C), of the teacher's width and grid.
        teacher: the same shapes.
        weights: of the parts.

    Returns:
        "loss", the weighted sum, and its parts "global_cosine", "patch_cosine" and "patch_mse" unweighted.

    Raises:
        ValueError: shapes that differ.

    Example:
        >>> tokens = DenseTokens(torch.ones(1, 4), torch.ones(1, 6, 4), (2, 3))
        >>> float(distillation_losses(tokens, tokens, LossWeights())["loss"])
        0.0

    Source: VECA, arXiv 2605.12491.
    """
    pairs = ((student.global_token, teacher.global_token), (student.patch_tokens, teacher.patch_tokens))
    for ours, theirs in pairs:
        if ours.shape != theirs.shape:
            raise ValueError(
                f"expected student and teacher of equal shapes, got {tuple(ours.shape)}, {tuple(theirs.shape)}"
            )
    with torch.autocast(student.patch_tokens.device.type, enabled=False):
        (mine, theirs), (patches, targets) = ((a.float(), b.detach().float()) for a, b in pairs)
        parts = {
            "global_cosine": (1 - F.cosine_similarity(mine, theirs, dim=-1)).mean(),
            "patch_cosine": (1 - F.cosine_similarity(patches, targets, dim=-1)).mean(),
            "patch_mse": F.mse_loss(patches, targets),
        }
        total = sum((getattr(weights, name) * part for name, part in parts.items()), torch.zeros_like(mine[0, 0]))
    return {"loss": total, **parts}
