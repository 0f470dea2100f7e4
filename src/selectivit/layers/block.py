"""A block of a core-periphery trunk."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from selectivit.layers.core_attention import CoreAttention
from selectivit.layers.swiglu import SwiGLU


class CoreBlock(nn.Module):
    """x += attention(norm(x)); x += SwiGLU(norm(x)); cores and patches share every weight.

    Args:
        dim: width of the tokens.
        num_heads: H.
        hidden_dim: of SwiGLU.
        normalizer: as for `core_attention`.

    Example:
        >>> from selectivit.ops.rope import axial_rotations
        >>> turned = axial_rotations(torch.rand(2 + 6, 2) * 2 - 1, head_dim=8)
        >>> CoreBlock(16, num_heads=2, hidden_dim=24)(torch.randn(1, 8, 16), turned[:2], turned[2:]).shape
        torch.Size([1, 8, 16])

    Source: VECA, arXiv 2605.12491.
    """

    def __init__(self, dim: int, num_heads: int, hidden_dim: int, normalizer: str | float = "softmax") -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(dim)
        self.attn = CoreAttention(dim, num_heads, normalizer)
        self.norm_ffn = nn.LayerNorm(dim)
        self.ffn = SwiGLU(dim, hidden_dim)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        core_rotations: Float[Tensor, "*b c pairs 2"],
        patch_rotations: Float[Tensor, "n pairs 2"],
    ) -> Float[Tensor, "b l d"]:
        """Apply the block.

        Args:
            x: (B, L, D), cores first.
            core_rotations: (C, head_dim / 2, 2) or (B, C, head_dim / 2, 2).
            patch_rotations: (N, head_dim / 2, 2).

        Returns:
            (B, L, D).
        """
        x = self.attn(self.norm_attn(x), core_rotations, patch_rotations, residual=x)
        return self.ffn(self.norm_ffn(x), residual=x)

    def core_map(self, x: Tensor, core_rotations: Tensor, patch_rotations: Tensor) -> Tensor:
        """How much each core takes from each patch in this block, (B, H, C, N); see `CoreAttention.core_map`."""
        return self.attn.core_map(self.norm_attn(x), core_rotations, patch_rotations)

    def patch_map(self, x: Tensor, core_rotations: Tensor, patch_rotations: Tensor) -> Tensor:
        """How much each patch takes from each core in this block, (B, H, N, C); see `CoreAttention.patch_map`."""
        return self.attn.patch_map(self.norm_attn(x), core_rotations, patch_rotations)
