"""DINO's loss for a batch that is computed in parts, by several processes: its centre moves once a step."""

from __future__ import annotations

import torch
from lightly.loss import DINOLoss
from torch import Tensor


class StepwiseDINOLoss(DINOLoss):
    """lightly's `DINOLoss`, whose centre waits for the whole batch: parts of a step then add up to the step.

    Args:
        out_dim: outputs of the heads.
        student_temperature: of the student's softmax.
        center_momentum: of the centre.

    Example:
        >>> loss = StepwiseDINOLoss(4, 0.1, 0.9)
        >>> outputs = [torch.randn(3, 4), torch.randn(3, 4)]
        >>> float(loss(outputs, outputs, teacher_temp=0.04)) > 0, float(loss.center.abs().sum())
        (True, 0.0)

    Source: DINO, arXiv 2104.14294.
    """

    def __init__(self, out_dim: int, student_temperature: float, center_momentum: float):
        super().__init__(out_dim, student_temp=student_temperature, center_momentum=center_momentum)

    def update_center(self, teacher_out: Tensor) -> None:
        """Nothing yet: `move_center` does it at the end of the step."""

    @torch.no_grad()
    def move_center(self, mean: Tensor) -> None:
        """Move the centre.

        Args:
            mean: (K,), of the teacher's outputs over the step's whole batch.
        """
        self.center.mul_(self.center_momentum).add_(mean.to(self.center), alpha=1 - self.center_momentum)

    def probabilities(self, teacher_out: Tensor, temperature: float) -> Tensor:
        """What the teacher asks for.

        Args:
            teacher_out: (B, K).
            temperature: of the teacher.

        Returns:
            (B, K), rows sum to 1.
        """
        return ((teacher_out - self.center[0]) / temperature).softmax(-1)
