"""Skipping a block's half for some images, by random numbers that come from outside."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth: in training, an image's addition is left out by chance, and the others' grow to make up for it.

    A training that must not depend on how a batch is split hands in the random numbers of its images; without them they
    are drawn here.

    Args:
        chance: of leaving out, 0 or more and below 1.

    Example:
        >>> layer = DropPath(0.5)
        >>> layer.numbers = torch.tensor([0.2, 0.7])
        >>> layer(torch.ones(2, 1, 1)).flatten().tolist()
        [0.0, 2.0]

    Source: Deep Networks with Stochastic Depth, arXiv 1603.09382.
    """

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance
        self.numbers: Tensor | None = None
        """(B,) in [0, 1), for the next forward and those after it; None draws them."""

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Leave out, or not.

        Args:
            x: (B, L, D), what a block's half would add.

        Returns:
            (B, L, D).
        """
        if not self.training or self.chance == 0:
            return x
        numbers = torch.rand(len(x), device=x.device) if self.numbers is None else self.numbers
        kept = (numbers >= self.chance).to(x.dtype) / (1 - self.chance)
        return x * kept.view(-1, 1, 1)

    def extra_repr(self) -> str:
        """The chance, in a model's printed form."""
        return f"chance={self.chance:.3f}"
