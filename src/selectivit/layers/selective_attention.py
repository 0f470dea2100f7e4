"""Self-attention that is trained under a rule of its own: entmax in place of softmax, with its projections."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from selectivit.ops.core_attention import rule_of
from selectivit.ops.selective import AttentionRule, selective_attention


class SelectiveAttention(nn.Module):
    """Multi-head self-attention under any rule; its parameters are those of timm's `Attention`.

    Args:
        dim: width of the tokens.
        num_heads: H, which divides dim.
        normalizer: "softmax", "entmax15", "sparsemax", entmax's α as a number, or an `AttentionRule`.
        qkv_bias: give the projections of q, k and v a bias.

    Raises:
        ValueError: heads that do not divide dim, or an unknown normalizer.

    Example:
        >>> import torch
        >>> SelectiveAttention(16, num_heads=2)(torch.randn(1, 5, 16)).shape
        torch.Size([1, 5, 16])

    Source: entmax-1.5 in every layer of a ViT, arXiv 2605.23868.
    """

    def __init__(
        self, dim: int, num_heads: int, normalizer: str | float | AttentionRule = "entmax15", qkv_bias: bool = True
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"expected a number of heads that divides dim {dim}, got {num_heads}")
        self.num_heads = num_heads
        self.rule = rule_of(normalizer)
        self.qkv: nn.Module = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Float[Tensor, "b l d"], attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Float[Tensor, "b l d"]:
        """Attend.

        Args:
            x: (B, L, D).
            attn_mask: None, or broadcastable to (B, H, L, L); bool (True may attend) or added to the scores.
            is_causal: must be False: patches of an image have no order in time. It is there for the host's call.

        Returns:
            (B, L, D).
        """
        if is_causal:
            raise ValueError("expected is_causal=False: give a mask instead")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, L, D/H)
        return self.proj(self.attend(q, k, v, attn_mask).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        """The attention itself, each (B, H, L, D / H)."""
        return selective_attention(q, k, v, self.rule, attn_mask=attn_mask)
