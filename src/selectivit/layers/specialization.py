"""One layer's weights twice: for the class token, and for all other tokens; attention between them stays joint."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Specialized(nn.Module):
    """Two layers of one kind in the place of one: the first token's, and that of the others.

    The second starts as a copy of the first, so that nothing changes until they are trained.

    Args:
        layer: maps tokens (B, L, C) each on its own: a norm, a scale, a linear map.

    Example:
        >>> layer = Specialized(nn.Linear(8, 24))
        >>> layer(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 24])

    Source: Revisiting [CLS] and Patch Token Interaction in Vision Transformers, arXiv 2602.08626.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.cls = layer
        self.patches = copy.deepcopy(layer)

    def forward(self, x: Float[Tensor, "b l c"]) -> Float[Tensor, "b l e"]:
        """Apply each layer to its tokens.

        Args:
            x: (B, L, C), the class token first; registers count with the patches.

        Returns:
            (B, L, E).
        """
        return torch.cat([self.cls(x[:, :1]), self.patches(x[:, 1:])], dim=1)
