"""SwiGLU: a feed-forward layer with a gate."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from selectivit.layers.linear import gated_linear, linear


class SwiGLU(nn.Module):
    """fc2(silu(a) ⊙ b) with [a, b] = fc1(x).

    Args:
        dim: width of the tokens.
        hidden_dim: width of a and of b.

    Example:
        >>> SwiGLU(8, 12)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])

    Source: GLU Variants Improve Transformer, arXiv 2002.05202.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Float[Tensor, "b l d"], residual: Float[Tensor, "b l d"] | None = None) -> Tensor:
        """Apply the layer.

        Args:
            x: (B, L, D).
            residual: (B, L, D), added to the result.

        Returns:
            (B, L, D).
        """
        return linear(self.fc2, gated_linear(self.fc1, x), residual)
