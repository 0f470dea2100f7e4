"""Core attention with its projections and rotary embeddings."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from selectivit.layers.linear import linear
from selectivit.ops.core_attention import core_attention, core_weights, listening_weights, rule_of
from selectivit.ops.rope import check_head_dim, rotate, rotate_


class CoreAttention(nn.Module):
    """Cores attend to all tokens, patches to the cores; every token is rotated by its place.

    Args:
        dim: width of the tokens.
        num_heads: H; dim / H must be a multiple of 4.
        normalizer: as for `core_attention`: "softmax", "entmax15", "sparsemax", or entmax's α as a number.

    Raises:
        ValueError: heads that do not divide dim, or an unknown normalizer.

    Example:
        >>> from selectivit.ops.rope import axial_rotations
        >>> places = torch.rand(2 + 6, 2) * 2 - 1
        >>> turned = axial_rotations(places, head_dim=8)
        >>> CoreAttention(16, num_heads=2)(torch.randn(1, 8, 16), turned[:2], turned[2:]).shape
        torch.Size([1, 8, 16])

    Source: VECA, arXiv 2605.12491.
    """

    def __init__(self, dim: int, num_heads: int, normalizer: str | float = "softmax") -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"expected a number of heads that divides dim {dim}, got {num_heads}")
        check_head_dim(dim // num_heads)
        self.num_heads = num_heads
        self.rule = rule_of(normalizer)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        core_rotations: Float[Tensor, "*b c pairs 2"],
        patch_rotations: Float[Tensor, "n pairs 2"],
        residual: Float[Tensor, "b l d"] | None = None,
    ) -> Float[Tensor, "b l d"]:
        """Attend.

        Args:
            x: (B, L, D), L = C + N tokens, cores first.
            core_rotations: (C, head_dim / 2, 2), or (B, C, head_dim / 2, 2) where every image moves its own cores.
            patch_rotations: (N, head_dim / 2, 2).
            residual: (B, L, D), added to the result.

        Returns:
            (B, L, D).
        """
        q, k, v = self._project(x, core_rotations, patch_rotations)
        out = core_attention(q, k, v, core_rotations.shape[-3], self.rule)  # (B, H, L, head_dim)
        return linear(self.proj, out.transpose(1, 2).flatten(2), residual)

    def core_map(
        self,
        x: Float[Tensor, "b l d"],
        core_rotations: Float[Tensor, "*b c pairs 2"],
        patch_rotations: Float[Tensor, "n pairs 2"],
    ) -> Float[Tensor, "b h c n"]:
        """How much each core takes from each patch.

        Args:
            x: (B, L, D), as for `forward`.
            core_rotations: as for `forward`.
            patch_rotations: as for `forward`.

        Returns:
            (B, H, C, N) float32; rows sum to 1 less what a core takes from cores.
        """
        num_cores = core_rotations.shape[-3]
        q, k, _ = self._project(x, core_rotations, patch_rotations)
        return core_weights(q, k, num_cores, self.rule)[..., num_cores:]

    def patch_map(
        self,
        x: Float[Tensor, "b l d"],
        core_rotations: Float[Tensor, "*b c pairs 2"],
        patch_rotations: Float[Tensor, "n pairs 2"],
    ) -> Float[Tensor, "b h n c"]:
        """How much each patch takes from each core.

        Args:
            x: (B, L, D), as for `forward`.
            core_rotations: as for `forward`.
            patch_rotations: as for `forward`.

        Returns:
            (B, H, N, C) float32; rows sum to 1.
        """
        q, k, _ = self._project(x, core_rotations, patch_rotations)
        return listening_weights(q, k, core_rotations.shape[-3], self.rule)

    def _project(self, x: Tensor, core_rotations: Tensor, patch_rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each a (B, H, L, head_dim) view."""
        num_cores, dim, heads = core_rotations.shape[-3], x.shape[-1], self.num_heads
        qk, v = linear(self.qkv, x).split((2 * dim, dim), -1)
        qk = qk.unflatten(-1, (2 * heads, -1))  # (B, L, 2 H, head_dim)
        cores, patches = qk.split((num_cores, x.shape[1] - num_cores), 1)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            turned = rotate(cores, core_rotations), rotate(patches, patch_rotations)
            q, k = torch.cat([_by_head(part, heads) for part in turned], -2).unbind(0)  # each whole in memory
        else:
            rotate_(cores, core_rotations)
            rotate_(patches, patch_rotations)
            q, k = _by_head(qk, heads).unbind(0)
        return q, k, v.unflatten(-1, (heads, -1)).transpose(1, 2)


def _by_head(qk: Tensor, heads: int) -> Tensor:
    """(B, L, 2 H, head_dim) as a view (2, B, H, L, head_dim)."""
    return qk.unflatten(2, (2, heads)).permute(2, 0, 3, 1, 4)
