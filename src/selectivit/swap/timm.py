"""timm: its three attention modules, and tokens of its ViT and EVA families (DeiT, DINO v1 to v3, SigLIP trunks)."""

from typing import Any

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3, apply_rot_embed_cat
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.swap.attend import attend
from selectivit.swap.sites import Edit, Halves, Preprocessing, Site, Tokens
from selectivit.swap.tap import pick_block, shadow, tap

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

LEFT_ALONE = {
    "DiffAttention": "differential attention subtracts two softmax maps",
    "ParallelScalingBlock": "computes attention inside the block, beside its MLP",
    "DiffParallelScalingBlock": "computes attention inside the block, beside its MLP",
}


class SelectiveAttention(Attention):
    """`timm.layers.Attention` under the rule it carries."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """As the host's forward, with our attention in place of softmax's."""
        q, k, v = _split_heads(self.qkv(x), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        return _finish(self, x, q, k, v, attn_mask, is_causal)


class SelectiveAttentionRope(AttentionRope):
    """`timm.layers.AttentionRope` under the rule it carries."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """As the host's forward, with our attention in place of softmax's."""
        q, k, v = _split_heads(self.qkv(x), self.num_heads) if self.qkv is not None else _separate_heads(self, x)
        q, k = _rotate(self, self.q_norm(q), self.k_norm(k), v, rope)
        groups = getattr(self, "num_kv_groups", 1)  # timm before 1.0.27 has no grouped queries
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return _finish(self, x, q, k, v, attn_mask, is_causal)


class SelectiveEvaAttention(EvaAttention):
    """`timm.models.eva.EvaAttention` under the rule it carries."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """As the host's forward, with our attention in place of softmax's."""
        if self.qkv is None:
            q, k, v = _separate_heads(self, x)
        elif self.q_bias is None:
            q, k, v = _split_heads(self.qkv(x), self.num_heads)
        else:
            biases: Any = (self.q_bias, self.k_bias, self.v_bias)  # k_bias is a buffer of zeros
            bias = torch.cat(biases)
            qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
            q, k, v = _split_heads(qkv, self.num_heads)
        q, k = _rotate(self, self.q_norm(q), self.k_norm(k), v, rope)
        return _finish(self, x, q, k, v, attn_mask, is_causal)


SELECTIVE: dict[type[nn.Module], type[nn.Module]] = {
    Attention: SelectiveAttention,
    AttentionRope: SelectiveAttentionRope,
    EvaAttention: SelectiveEvaAttention,
}


def _split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, _ = qkv.shape
    q, k, v = qkv.reshape(batch, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, L, D)
    return q, k, v


def _separate_heads(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, _ = x.shape
    kv_heads = getattr(module, "num_kv_heads", module.num_heads)
    q = module.q_proj(x).reshape(batch, length, module.num_heads, -1).transpose(1, 2)  # (B, H, L, D)
    k = module.k_proj(x).reshape(batch, length, kv_heads, -1).transpose(1, 2)
    v = module.v_proj(x).reshape(batch, length, kv_heads, -1).transpose(1, 2)
    return q, k, v


def _rotate(module: Any, q: Tensor, k: Tensor, v: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rotary embeddings on the patches alone: class and register tokens have no place in the image."""
    if rope is None:
        return q, k
    prefix, half = module.num_prefix_tokens, getattr(module, "rotate_half", False)

    def turn(tokens: Tensor) -> Tensor:
        turned = apply_rot_embed_cat(tokens[:, :, prefix:], rope, half=half)
        return torch.cat([tokens[:, :, :prefix], turned], dim=2).type_as(v)

    return turn(q), turn(k)


def _finish(
    module: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Attention, then the host's norm, gate and projection."""
    batch, length, _ = x.shape
    if is_causal:
        if attn_mask is not None:
            raise ValueError("expected attn_mask or is_causal, got both")
        attn_mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    dropout_p = module.attn_drop.p if module.training else 0.0
    out = attend(module, q, k, v, scale=module.scale, attn_mask=attn_mask, dropout_p=dropout_p)  # (B, H, L, D)
    out = module.norm(out.transpose(1, 2).reshape(batch, length, -1))
    gate = getattr(module, "gate", None)  # timm before 1.0.25 has no gate
    if gate is not None:
        out = out * gate(x).sigmoid()
    return module.proj_drop(module.proj(out))


def is_tower(module: nn.Module) -> bool:
    """Whether `module` is a whole timm model."""
    return any(base.__module__.startswith("timm.models.") for base in type(module).__mro__) and hasattr(
        module, "forward_features"
    )


def site(name: str, module: nn.Module, parents: tuple[nn.Module, ...]) -> Site | str | None:
    """The site of an attention module, or why it is left alone, or None."""
    kind = type(module)
    if kind in SELECTIVE or kind in SELECTIVE.values():
        edit = Edit(module, "__class__", SELECTIVE.get(kind, kind))
        known: Any = module
        return Site(name, module, known.num_heads, "timm", (edit,), projection=known.proj)
    if isinstance(module, tuple(SELECTIVE)):
        return f"a subclass of timm's {kind.__base__.__name__ if kind.__base__ else kind.__name__} with its own code"
    return LEFT_ALONE.get(kind.__name__)


def blocks(tower: Any) -> list[tuple[str, nn.Module]]:
    """The tower's transformer blocks in order, with their names in the tower."""
    _check_family(tower)
    return [(f"blocks.{name}", block) for name, block in tower.blocks.named_children()]


def tokens(tower: Any, images: Tensor, layer: int, norm: bool) -> Tokens:
    """The tokens that leave block `layer`, at any image size."""
    _check_family(tower)
    patch_h, patch_w = tower.patch_embed.patch_size
    grid = (images.shape[-2] // patch_h, images.shape[-1] // patch_w)
    if torch.compiler.is_exporting():
        tower = _free_rotations(tower)
    model = tower if tower.dynamic_img_size or grid == tuple(tower.patch_embed.grid_size) else _any_size(tower, grid)
    out = tap(pick_block(list(tower.blocks), layer), lambda: model.forward_features(images))
    has_cls = getattr(tower, "cls_token", None) is not None
    registers = getattr(tower, "reg_token", None)
    return Tokens(
        tokens=tower.norm(out) if norm else out,
        num_prefix=tower.num_prefix_tokens,
        has_cls=has_cls,
        num_registers=0 if registers is None else registers.shape[1],
        grid=grid,
    )


def preprocessing(tower: Any) -> Preprocessing:
    """From the model's own configuration; ImageNet's mean and std where it has none."""
    _check_family(tower)
    config = getattr(tower, "pretrained_cfg", None) or getattr(tower, "default_cfg", None) or {}
    patch_h, patch_w = tower.patch_embed.patch_size
    if patch_h != patch_w:
        raise ValueError(f"expected square patches, got {patch_h} x {patch_w}")
    mean, std = config.get("mean") or IMAGENET_MEAN, config.get("std") or IMAGENET_STD
    height, width = tower.patch_embed.img_size or config.get("input_size", (3, 224, 224))[1:]
    return Preprocessing(tuple(mean), tuple(std), patch_h, (height, width))


def halves(block: Any, **given: Any) -> Halves:
    """The halves of a block; the arguments are those of its forward.

    Raises:
        ValueError: a block whose halves cannot be told apart.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(block, Block):
        return Halves(
            norm=block.norm1,
            attention=lambda x: block.drop_path1(block.ls1(block.attn(x, **given))),
            ffn=lambda x: block.drop_path2(block.ls2(block.mlp(block.norm2(x)))),
        )
    if isinstance(block, (ResPostBlock, EvaBlockPostNorm)):
        return Halves(
            norm=lambda x: x,
            attention=lambda x: block.drop_path1(block.norm1(block.attn(x, **given))),
            ffn=lambda x: block.drop_path2(block.norm2(block.mlp(x))),
        )
    if isinstance(block, EvaBlock):
        return Halves(
            norm=block.norm1,
            attention=lambda x: block.drop_path1(_scaled(block.gamma_1, block.attn(x, **given))),
            ffn=lambda x: block.drop_path2(_scaled(block.gamma_2, block.mlp(block.norm2(x)))),
        )
    raise ValueError(f"the attention and the FFN of timm's {type(block).__name__} cannot be told apart")


def _scaled(gamma: Tensor | None, x: Tensor) -> Tensor:
    return x if gamma is None else gamma * x


def align(tower: Any, tokens: Tensor) -> Tensor:
    """Tokens of the last block (B, L, C) as the model's head gives them, each on its own: (B, L, E).

    An attention pool is given one token at a time: a single key gets all of its attention, so that what is left of it
    are the value and output projections and the MLP.

    Raises:
        ValueError: an attention pool with positions of its own, to which one token says nothing.
    """
    tokens = tower.norm(tokens)
    pool = getattr(tower, "attn_pool", None)
    if pool is not None:
        if getattr(pool, "pos_embed", None) is not None:
            raise ValueError("the attention pool has positions of its own: it cannot be given one token at a time")
        batch, length, _ = tokens.shape
        tokens = pool(tokens.reshape(batch * length, 1, -1)).unflatten(0, (batch, length))
    return tower.head(tower.head_drop(tower.fc_norm(tokens)))


def _check_family(tower: nn.Module) -> None:
    if not isinstance(tower, (VisionTransformer, Eva)) or not isinstance(tower.patch_embed, PatchEmbed):
        raise ValueError(
            f"expected timm's VisionTransformer or Eva on plain patches, got {type(tower).__name__}: its blocks do not "
            "hand on one token a patch"
        )


def _any_size(tower: Any, grid: tuple[int, int]) -> Any:
    """The same model, parameters shared, with timm's own handling of other image sizes turned on."""
    model = shadow(tower)
    model.dynamic_img_size = True
    patches = shadow(tower.patch_embed)
    patches.strict_img_size, patches.flatten = False, False
    patches.output_fmt = type(patches.output_fmt)("NHWC")
    model._modules["patch_embed"] = patches
    rope = getattr(tower, "rope", None)
    if rope is not None and hasattr(rope, "update_feat_shape"):
        rope = shadow(rope)
        rope.__dict__["_buffers"] = {name: None if b is None else b.clone() for name, b in rope._buffers.items()}
        rope.update_feat_shape(list(grid))  # embeddings cached for one grid would ignore the new one
        model._modules["rope"] = rope
    return model


def _free_rotations(tower: Any) -> Any:
    """The same model for a tracer: timm counts DINOv3's grid in Python's floats, which would fix its sides."""
    rope = getattr(tower, "rope", None)
    if type(rope) is not RotaryEmbeddingDinoV3 or (rope.normalize_coords, rope.grid_indexing) != ("separate", "ij"):
        return tower
    model, rope = shadow(tower), shadow(rope)

    def create(sides: tuple[int, int], no_aug: bool = False) -> Tensor:
        steps = [(torch.arange(side) + (0.5 + rope.grid_offset)) / side for side in sides]
        grid = torch.stack(torch.meshgrid(steps, indexing="ij"), dim=-1)  # (h, w, 2)
        return torch.cat(rope._get_pos_embed_from_coords((2 * grid - 1).flatten(0, 1)), dim=-1)

    rope._create_embed = create  # pyright: ignore[reportAttributeAccessIssue]
    model._modules["rope"] = rope
    return model
