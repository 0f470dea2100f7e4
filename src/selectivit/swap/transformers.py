"""transformers: attention through its AttentionInterface, layer by layer, and tokens of its image towers."""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from selectivit.ops.selective import attention_weights
from selectivit.swap.attend import STATE, attend, note, state_of
from selectivit.swap.sites import Edit, Halves, Preprocessing, Site, Tokens
from selectivit.swap.tap import pick_block, tap

NAME = "selectivit"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPENAI = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

# Image towers: the final norm over tokens, and the mean and std of the published weights.
TOWERS = {
    "CLIPVisionModel": ("post_layernorm", OPENAI),
    "CLIPVisionTransformer": ("post_layernorm", OPENAI),
    "SiglipVisionModel": ("post_layernorm", HALF),
    "SiglipVisionTransformer": ("post_layernorm", HALF),
    "Siglip2VisionModel": ("post_layernorm", HALF),
    "Siglip2VisionTransformer": ("post_layernorm", HALF),
    "Dinov2Model": ("layernorm", IMAGENET),
    "Dinov2Backbone": ("layernorm", IMAGENET),
    "Dinov2WithRegistersModel": ("layernorm", IMAGENET),
    "Dinov2WithRegistersBackbone": ("layernorm", IMAGENET),
    "DINOv3ViTModel": ("norm", IMAGENET),
    "DINOv3ViTBackbone": ("norm", IMAGENET),
    "ViTModel": ("layernorm", HALF),
}
WRAPPERS = ("TimmWrapperModel", "TimmWrapperForImageClassification")
BLOCK_LISTS = ("encoder.layers", "encoder.layer", "model.layer", "layers", "layer")
ATTENTION = ("CLIP", "Siglip", "Siglip2", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "ViT")


def selective_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that swapped layers ask for by name.

    Args:
        module: the attention module, which carries its rule.
        query: (B, H, N, D).
        key: (B, H, N, D).
        value: (B, H, N, D).
        attention_mask: None, or (B, 1, N, N), bool (True may attend) or added to the scores.
        scaling: the host's factor on the scores.
        dropout: on the probabilities.
        is_causal: whether a layer without a mask looks back only; none of the image towers does.
        **kwargs: passed on to the host's own function while a layer is only recorded.

    Returns:
        (B, N, H, D), and the (B, H, N, N) weights where the host's eager attention would have returned them.
    """
    state = state_of(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    mask = _as_mask(attention_mask, query, causal)
    if state.rule is None:  # recorded, not swapped: the host computes, so that not a bit changes
        note(state, query, key, value, scale, mask)
        host = _host_function(module, state.host or _implementation(module))
        return host(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs
        )
    out = attend(module, query, key, value, scale=scale, attn_mask=mask, dropout_p=dropout)
    weights = None
    if (
        state.host == "eager" and state.instead is None
    ):  # output_attentions counts on every layer's weights: one missing shifts the others
        weights = attention_weights(query, key, value, state.rule, scale=scale, attn_mask=mask).to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, selective_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without one, a causal text tower of that name would see ahead


def _as_mask(mask: Any, query: Tensor, causal: bool) -> Tensor | None:
    if mask is None:
        length = query.shape[-2]
        return torch.ones(length, length, dtype=torch.bool, device=query.device).tril() if causal else None
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"expected a tensor mask, got {type(mask).__name__}: load the model with attn_implementation='sdpa'"
        )
    return mask[:, None, None, :].bool() if mask.ndim == 2 else mask  # flash attention's masks are (B, N)


def _host_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009 - of an unknown module
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)


def is_tower(module: nn.Module) -> bool:
    """Whether `module` is an image tower that this file knows."""
    name = type(module).__name__
    if not type(module).__module__.startswith("transformers."):
        return False
    return name in WRAPPERS or (name in TOWERS and hasattr(module, TOWERS[name][0]))


def site(name: str, module: nn.Module, parents: tuple[nn.Module, ...]) -> Site | str | None:
    """The site of an attention module, or why it is left alone, or None."""
    kind = type(module)
    known = kind.__name__ in [f"{family}{suffix}" for family in ATTENTION for suffix in ("Attention", "SelfAttention")]
    if not known or not hasattr(module, "config") or not _projects(module):
        return None
    if not kind.__module__.startswith("transformers."):
        return f"{kind.__qualname__} is a copy of transformers' with its own code"
    config: Any = module.config
    implementation = _implementation(module)
    ours = copy.copy(config)
    ours._attn_implementation = NAME
    heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads")  # noqa: B009 - one or the other
    projection = getattr(module, "o_proj", None) or getattr(module, "out_proj", None)
    edits = (Edit(module, "config", ours),)
    return Site(name, module, heads, "transformers", edits, implementation, projection=projection)


def _implementation(module: Any) -> str:
    """The attention that the host would use, also under a swap or a recording."""
    while (name := module.config._attn_implementation) == NAME:
        state = vars(module).get(STATE)
        if state is not None:
            return state.host
        # Another thread's recording ended between the two lines: its last step put the configuration back.
    return name


def _projects(module: nn.Module) -> bool:
    """Whether the module itself computes q; in older releases an outer module of the same name wraps it."""
    return any(isinstance(getattr(module, name, None), nn.Linear) for name in ("q_proj", "query"))


def blocks(tower: Any) -> list[tuple[str, nn.Module]]:
    """The tower's transformer blocks in order, with their names in the tower."""
    if type(tower).__name__ in WRAPPERS:
        from selectivit.swap import timm

        return [(f"timm_model.{name}", block) for name, block in timm.blocks(tower.timm_model)]
    modules = dict(tower.named_modules())
    for name in BLOCK_LISTS:
        if isinstance(modules.get(name), nn.ModuleList):
            return [(f"{name}.{index}", block) for index, block in modules[name].named_children()]
    raise ValueError(f"no list of blocks found in {type(tower).__name__}: looked for {', '.join(BLOCK_LISTS)}")


def tokens(tower: Any, images: Tensor, layer: int, norm: bool) -> Tokens:
    """The tokens that leave block `layer`, before any projection, at any image size."""
    if type(tower).__name__ in WRAPPERS:
        from selectivit.swap import timm

        return timm.tokens(tower.timm_model, images, layer, norm)
    kind, patch = type(tower).__name__, _side(tower.config.patch_size)
    grid = (images.shape[-2] // patch, images.shape[-1] // patch)
    block = pick_block([block for _, block in blocks(tower)], layer)
    out = tap(block, lambda: tower(**_inputs(kind, images, patch, grid)))
    has_cls = not kind.startswith("Siglip")
    registers = getattr(tower.config, "num_register_tokens", 0)
    return Tokens(
        tokens=getattr(tower, TOWERS[kind][0])(out) if norm else out,
        num_prefix=int(has_cls) + registers,
        has_cls=has_cls,
        num_registers=registers,
        grid=grid,
    )


def _inputs(kind: str, images: Tensor, patch: int, grid: tuple[int, int]) -> dict[str, Any]:
    """What the tower's forward takes for images of any size."""
    if kind.startswith("Dino") or kind.startswith("DINO"):
        return {"pixel_values": images}  # interpolates its positions, or has none
    if not kind.startswith("Siglip2"):
        return {"pixel_values": images, "interpolate_pos_encoding": True}
    batch, (height, width) = len(images), grid  # SigLIP 2 takes patches, each (row, column, channel), and their grid
    patches = images.unflatten(-1, (width, patch)).unflatten(-3, (height, patch))  # (B, 3, h, P, w, P)
    return {
        "pixel_values": patches.permute(0, 2, 4, 3, 5, 1).reshape(batch, height * width, -1),
        "pixel_attention_mask": torch.ones(batch, height * width, dtype=torch.int32, device=images.device),
        "spatial_shapes": torch.tensor([grid] * batch, device=images.device),
    }


def preprocessing(tower: Any) -> Preprocessing:
    """The mean and std of the published weights; models carry none (they are in the processor's files)."""
    if type(tower).__name__ in WRAPPERS:
        from selectivit.swap import timm

        return timm.preprocessing(tower.timm_model)
    config = tower.config
    mean, std = TOWERS[type(tower).__name__][1]
    if type(tower).__name__ == "ViTModel" and "dino" in str(getattr(config, "_name_or_path", "")).lower():
        mean, std = IMAGENET  # DINO v1 shares its class with ViT
    patch = _side(config.patch_size)
    size = getattr(config, "image_size", None)  # SigLIP 2 has no image size, only a number of patches
    if size is None:
        size = int(config.num_patches**0.5) * patch
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return Preprocessing(mean, std, patch, (height, width))


def halves(block: Any, mask: Tensor | None = None, **more: Any) -> Halves:
    """The halves of an encoder layer of CLIP, SigLIP or SigLIP 2; the arguments are those of its forward.

    Raises:
        ValueError: a layer of another kind.
    """
    if not all(hasattr(block, name) for name in ("layer_norm1", "self_attn", "layer_norm2", "mlp")):
        raise ValueError(f"expected an encoder layer of CLIP, SigLIP or SigLIP 2, got {type(block).__name__}")
    more = {"attention_mask": mask} | more
    return Halves(
        norm=block.layer_norm1,
        attention=lambda x: block.self_attn(hidden_states=x, **more)[0],
        ffn=lambda x: block.mlp(block.layer_norm2(x)),
    )


def align(model: Any, tower: Any, tokens: Tensor) -> Tensor:
    """Tokens of the last block (B, L, C) to the space that images and texts share, (B, L, E), each on its own.

    SigLIP's pooling head is given one token at a time: a single key gets all of its attention, so that what is left of
    it are the value and output projections and the MLP.

    Raises:
        ValueError: a model without a text tower, or without the layers that lead to the shared space.
    """
    tokens = tower.post_layernorm(tokens)
    if hasattr(model, "visual_projection"):
        return model.visual_projection(tokens)
    if getattr(tower, "head", None) is None:
        raise ValueError(
            f"{type(model).__name__} has neither a visual projection nor a pooling head: its patches and its texts "
            "share no space"
        )
    batch, length, _ = tokens.shape
    return tower.head(tokens.reshape(batch * length, 1, -1)).unflatten(0, (batch, length))


def has_text(model: Any) -> bool:
    """Whether a model embeds images and texts in one space."""
    return hasattr(model, "get_text_features") and hasattr(model, "text_model")


def encode_image(model: Any, images: Tensor) -> Tensor:
    """Images to the shared space, (B, E), by the model itself."""
    kind, patch = type(model.vision_model).__name__, _side(model.vision_model.config.patch_size)
    inputs = _inputs(kind, images, patch, (images.shape[-2] // patch, images.shape[-1] // patch))
    found = model.get_image_features(**inputs)
    return getattr(found, "pooler_output", found)


def encode_text(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Texts to the shared space, (T, E); padded to the model's length, as SigLIP was trained and CLIP does not mind."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    length = model.config.text_config.max_position_embeddings
    tokens = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids = tokens["input_ids"].to(next(model.parameters()).device)
    _check_vocabulary(ids, model.config.text_config.vocab_size)
    found = model.get_text_features(input_ids=ids)
    return getattr(found, "pooler_output", found)


def _check_vocabulary(ids: Tensor, size: int) -> None:
    if ids.max() >= size:
        raise ValueError(f"the tokenizer gives token {ids.max()}, the text tower knows {size}: it is another model's")


def _side(patch_size: Any) -> int:
    if not isinstance(patch_size, (tuple, list)):
        return int(patch_size)
    if patch_size[0] != patch_size[1]:
        raise ValueError(f"expected square patches, got {patch_size[0]} x {patch_size[1]}")
    return int(patch_size[0])
