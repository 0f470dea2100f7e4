"""A Vision Transformer as DINO trains it: timm's, with attention, registers and specialization put together freely."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.layers.layer_scale import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from selectivit.layers.drop_path import DropPath
from selectivit.layers.selective_attention import SelectiveAttention
from selectivit.layers.specialization import Specialized
from selectivit.models.checkpoint import fill, read_model, write_model
from selectivit.models.dino_official import read_dino
from selectivit.models.dino_vit_config import DinoVitConfig
from selectivit.ops.core_attention import rule_of

KIND = "dino_vit"
OFFSET = 0.1  # patches; against rounding, in the authors' code


class DinoViT(VisionTransformer):
    """timm's VisionTransformer under a `DinoVitConfig`; its tensors bear the names of DINO's public checkpoints.

    With softmax, without registers and specialization it computes what the authors' ViT computes, at any image size.
    Models of one seed start with the same weights, whatever their attention and specialization.

    Args:
        config: see `DinoVitConfig`; `create_model("dino_vit_small_patch16")` makes one of the published sizes.

    Example:
        >>> model = DinoViT(DinoVitConfig(dim=32, depth=2, num_heads=2, image_size=32, attention="entmax15"))
        >>> model(torch.randn(1, 3, 32, 48)).shape, model.forward_features(torch.randn(1, 3, 32, 48)).shape
        (torch.Size([1, 32]), torch.Size([1, 7, 32]))

    Source: DINO, arXiv 2104.14294; entmax-1.5 in every layer, arXiv 2605.23868; specialization, arXiv 2602.08626.
    """

    def __init__(self, config: DinoVitConfig) -> None:
        super().__init__(
            img_size=config.image_size,
            patch_size=config.patch_size,
            num_classes=0,
            embed_dim=config.dim,
            depth=config.depth,
            num_heads=config.num_heads,
            reg_tokens=config.registers,
            init_values=config.layer_scale,
            dynamic_img_size=True,
        )
        self.config = config
        for place, block in enumerate(self.blocks.children()):
            if rule_of(config.attention).normalizer != "softmax":
                block.attn = _selective(block.attn, config)  # pyright: ignore[reportArgumentType]
            if place < int(config.specialization):
                _specialize(block, config.dim)
            if config.drop_path:
                chance = config.drop_path * place / max(1, config.depth - 1)
                block.drop_path1, block.drop_path2 = DropPath(chance), DropPath(chance)

    def _pos_embed(self, x: Tensor) -> Tensor:
        assert self.pos_embed is not None and self.cls_token is not None
        batch, height, width, _ = x.shape
        prefix = [self.cls_token, *([] if self.reg_token is None else [self.reg_token])]
        tokens = torch.cat([*(token.expand(batch, -1, -1) for token in prefix), x.flatten(1, 2)], dim=1)
        table, old = self.pos_embed, self.patch_embed.grid_size
        return self.pos_drop(tokens + resized_positions(table, old, (height, width), self.num_prefix_tokens))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write model.safetensors and config.json.

        Args:
            folder: made if it is not there.
        """
        write_model(self, folder, KIND, dataclasses.asdict(self.config))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> DinoViT:
        """A model that `save_pretrained` wrote, in eval mode and the dtype it was saved in.

        Args:
            folder: holds model.safetensors and config.json.

        Returns:
            The model.

        Raises:
            WeightsError: files that are missing, damaged, of another model, or do not fit each other.
        """
        arguments, state = read_model(folder, KIND)
        return cls._filled(DinoVitConfig(**arguments), state, str(folder))

    @classmethod
    def from_official(
        cls,
        checkpoint: str | os.PathLike[str] | Mapping[str, Any],
        *,
        which: str = "teacher",
        num_heads: int | None = None,
        image_size: int | None = None,
        attention: str | float = "softmax",
    ) -> DinoViT:
        """A model with the weights of DINO's public code, bare or out of a training checkpoint.

        Args:
            checkpoint: a .pth or .pt file of plain tensors, a .safetensors file, or a state dict.
            which: "teacher" or "student", where the checkpoint holds both.
            num_heads: where heads are not 64 wide.
            image_size: pixels a side that the table of positions is brought to; None keeps the checkpoint's.
            attention: as for `DinoVitConfig`; another one than the weights were trained with is a training-free swap.

        Returns:
            The model in eval mode.

        Raises:
            ValueError: tensors of another architecture; those that are missing or too many are named.
            WeightsError: a file that cannot be read, or tensors of other shapes.
        """
        arguments, state = read_dino(checkpoint, which, num_heads)
        config = DinoVitConfig(**arguments, attention=attention)
        if image_size is not None and image_size != config.image_size:
            old = config.image_size // config.patch_size
            config = dataclasses.replace(config, image_size=image_size)
            new = config.image_size // config.patch_size
            state["pos_embed"] = resized_positions(state["pos_embed"], (old, old), (new, new), 1)
        return cls._filled(config, state, "the official checkpoint")

    @classmethod
    def _filled(cls, config: DinoVitConfig, state: Mapping[str, Tensor], what: str) -> DinoViT:
        with torch.device("meta"):
            model = cls(config)
        return fill(model, state, what).eval()


def resized_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix: int) -> Tensor:
    """A table of positions for another grid, as the authors resize it: plain bicubic, with their offset.

    Args:
        table: (1, num_prefix + h * w, C).
        old: (h, w) of the table.
        new: (h, w) wanted.
        num_prefix: rows that are no patch's; they stay.

    Returns:
        (1, num_prefix + h * w, C) of the new grid.

    Example:
        >>> resized_positions(torch.randn(1, 1 + 16, 8), (4, 4), (2, 6), 1).shape
        torch.Size([1, 13, 8])

    Source: DINO's public code, `interpolate_pos_encoding`.
    """
    if tuple(old) == tuple(new):
        return table
    patches = table[:, num_prefix:].unflatten(1, old).permute(0, 3, 1, 2).float()  # (1, C, h, w)
    factors = [(wanted + OFFSET) / had for wanted, had in zip(new, old, strict=True)]
    patches = F.interpolate(patches, scale_factor=factors, mode="bicubic", align_corners=False)
    return torch.cat([table[:, :num_prefix], patches.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)


def _selective(attention: Attention, config: DinoVitConfig) -> SelectiveAttention:
    """Our attention around the projections of timm's."""
    with torch.device("meta"):  # its own are thrown away
        ours = SelectiveAttention(config.dim, config.num_heads, config.attention)
    ours.qkv, ours.proj = attention.qkv, attention.proj
    return ours


def _specialize(block: Any, dim: int) -> None:
    """Norms, LayerScale and the projections of q, k and v of a block twice."""
    if isinstance(block.ls1, nn.Identity):
        block.ls1, block.ls2 = LayerScale(dim, init_values=1.0), LayerScale(dim, init_values=1.0)
    for name in ("norm1", "ls1", "norm2", "ls2"):
        setattr(block, name, Specialized(getattr(block, name)))
    block.attn.qkv = Specialized(block.attn.qkv)
