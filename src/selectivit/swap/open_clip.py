"""open_clip: its own `Attention`, and tokens of its image towers; timm towers go the way of timm."""

from collections.abc import Sequence
from typing import Any

import torch
from open_clip.timm_model import TimmModel
from open_clip.transformer import Attention, CustomResidualAttentionBlock, ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.swap.attend import attend
from selectivit.swap.sites import Edit, Halves, Preprocessing, Site, Tokens
from selectivit.swap.tap import pick_block, resize_positions, shadow, tap

OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class SelectiveAttention(Attention):
    """`open_clip.transformer.Attention` under the rule it carries."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """As the host's forward, with our attention in place of softmax's."""
        batch, length, dim = x.shape
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (
            part.reshape(batch, length, self.num_heads, -1).transpose(1, 2) for part in (q, k, v)
        )  # (B, H, L, D)
        if attn_mask is not None:
            if attn_mask.ndim == 3:
                attn_mask = attn_mask.reshape(batch, self.num_heads, length, length)
            if attn_mask.dtype == torch.bool:
                attn_mask = ~attn_mask  # here True is masked; ours, as SDPA's, says who may attend
        dropout_p = self.attn_drop.p if self.training else 0.0
        out = attend(
            self, self.ln_q(q), self.ln_k(k), v, scale=self.scale, attn_mask=attn_mask, dropout_p=dropout_p
        )  # (B, H, L, D)
        if self.head_scale is not None:
            out = out * self.head_scale
        out = self.ln_inner(out.transpose(1, 2).reshape(batch, length, dim))
        return self.out_drop(self.out_proj(out))


def is_tower(module: nn.Module) -> bool:
    """Whether `module` is an image tower; the text transformer is none."""
    return isinstance(module, (VisionTransformer, TimmModel))


def site(name: str, module: nn.Module, parents: tuple[nn.Module, ...]) -> Site | str | None:
    """The site of an attention module, or why it is left alone, or None."""
    if not isinstance(module, Attention):
        return None
    if type(module) not in (Attention, SelectiveAttention):
        return "a subclass of open_clip's Attention with its own code"
    if module.logit_scale is not None:
        return "scaled cosine attention: its scores are bounded by a learnt temperature, not by 1/sqrt(d)"
    edit = Edit(module, "__class__", SelectiveAttention)
    return Site(name, module, module.num_heads, "open_clip", (edit,), projection=module.out_proj)


def blocks(tower: Any) -> list[tuple[str, nn.Module]]:
    """The tower's transformer blocks in order, with their names in the tower."""
    if isinstance(tower, TimmModel):
        from selectivit.swap import timm

        return [(f"trunk.{name}", block) for name, block in timm.blocks(tower.trunk)]
    return [(f"transformer.resblocks.{i}", block) for i, block in enumerate(tower.transformer.resblocks)]


def tokens(tower: Any, images: Tensor, layer: int, norm: bool) -> Tokens:
    """The tokens that leave block `layer`, before any projection, at any image size."""
    if isinstance(tower, TimmModel):
        from selectivit.swap import timm

        return timm.tokens(tower.trunk, images, layer, norm)
    patch_h, patch_w = tower.patch_size
    grid = (images.shape[-2] // patch_h, images.shape[-1] // patch_w)
    model = tower
    if grid != tuple(tower.grid_size):
        model = shadow(tower)
        positions = resize_positions(tower.positional_embedding[None], tuple(tower.grid_size), grid, num_prefix=1)
        model._parameters["positional_embedding"] = positions[0]
    out = tap(pick_block(list(tower.transformer.resblocks), layer), lambda: model(images))
    if not tower.transformer.batch_first:
        out = out.transpose(0, 1)
    # With an attentional pooler ln_post comes after the pooling, in its width: the tokens have no norm of their own.
    norms_tokens = norm and tower.attn_pool is None
    return Tokens(
        tokens=tower.ln_post(out) if norms_tokens else out, num_prefix=1, has_cls=True, num_registers=0, grid=grid
    )


def preprocessing(tower: Any) -> Preprocessing:
    """From the tower's own configuration; OpenAI's mean and std where it has none."""
    config = getattr(tower, "preprocess_cfg", None) or {}
    if isinstance(tower, TimmModel):
        from selectivit.swap import timm

        trunk = timm.preprocessing(tower.trunk)
        mean, std = config.get("mean") or trunk.mean, config.get("std") or trunk.std
        return Preprocessing(tuple(mean), tuple(std), trunk.patch_size, trunk.image_size)
    patch_h, patch_w = tower.patch_size
    if patch_h != patch_w:
        raise ValueError(f"expected square patches, got {patch_h} x {patch_w}")
    mean, std = config.get("mean") or OPENAI_MEAN, config.get("std") or OPENAI_STD
    return Preprocessing(tuple(mean), tuple(std), patch_h, tuple(tower.image_size))


def halves(block: Any, attn_mask: Tensor | None = None, **more: Any) -> Halves:
    """The halves of a block of an image tower; the arguments are those of its forward.

    Raises:
        ValueError: a block of another kind.
    """
    if isinstance(block, ResidualAttentionBlock):
        return Halves(
            norm=block.ln_1,
            attention=lambda x: block.ls_1(block.attention(q_x=x, attn_mask=attn_mask)),
            ffn=lambda x: block.ls_2(block.mlp(block.ln_2(x))),
        )
    if isinstance(block, CustomResidualAttentionBlock):
        return Halves(
            norm=block.ln_1,
            attention=lambda x: block.ls_1(block.ln_attn(block.attn(x, attn_mask=attn_mask))),
            ffn=lambda x: block.ls_2(block.mlp(block.ln_2(x))),
        )
    from selectivit.swap import timm

    return timm.halves(block, attn_mask=attn_mask, **more)


def align(model: Any, tower: Any, tokens: Tensor) -> Tensor:
    """Tokens of the last block (B, L, C) to the space that images and texts share, (B, L, E), each on its own.

    Raises:
        ValueError: a tower whose pooling has no meaning for a single token.
    """
    if isinstance(tower, TimmModel):
        from selectivit.swap import timm

        if hasattr(tower.head, "pool"):
            raise ValueError("the tower pools all places together before it projects: its patches have no text space")
        return tower.head(timm.align(tower.trunk, tokens))
    if tower.attn_pool is not None:
        raise ValueError(
            "the tower ends in an attentional pooler (CoCa), whose queries were trained for captions: no published way "
            "leads from its patch tokens to the space of texts"
        )
    tokens = tower.ln_post(tokens)
    return tokens if tower.proj is None else tokens @ tower.proj


def has_text(model: Any) -> bool:
    """Whether a model embeds images and texts in one space."""
    return callable(getattr(model, "encode_text", None)) and hasattr(model, "visual")


def encode_image(model: Any, images: Tensor) -> Tensor:
    """Images to the shared space, (B, E), by the model itself."""
    return model.encode_image(images)


def encode_text(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Texts to the shared space, (T, E)."""
    ids = tokenizer(list(texts))
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"expected a tokenizer that gives a tensor (texts, context length), as open_clip.get_tokenizer does, got "
            f"{type(ids).__name__}"
        )
    ids = ids.to(next(model.parameters()).device)
    size = getattr(model, "vocab_size", None)
    if size is not None and ids.max() >= size:
        raise ValueError(f"the tokenizer gives token {ids.max()}, the text tower knows {size}: it is another model's")
    return model.encode_text(ids)
