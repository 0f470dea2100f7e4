"""Plain torch: `nn.MultiheadAttention`, its fast paths in `nn.TransformerEncoder`, and torchvision's ViT."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.ops.selective import SOFTMAX, attention_weights
from selectivit.swap.attend import attend, state_of
from selectivit.swap.sites import POOLS, Edit, Preprocessing, Site, Tokens
from selectivit.swap.tap import pick_block, resize_positions, tap


class SelectiveMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` under the rule it carries; never takes the native fast path."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As the host's forward, with our attention in place of softmax's; masks are True where masked."""
        if query.is_nested:
            return _forward_nested(self, query, need_weights), None
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: expected attn_mask too, got None")
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (tokens.transpose(0, 1) for tokens in (query, key, value))
        q, k, v = _project(self, query, key, value)  # each (B, H, ., D)
        mask = _may_attend(attn_mask, key_padding_mask, q, k)
        k, v, mask = _extra_keys(self, k, v, mask)
        scale = self.head_dim**-0.5
        out = attend(self, q, k, v, scale=scale, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0)
        out = self.out_proj(out.transpose(1, 2).flatten(2))  # (B, N, C)
        weights = None
        if need_weights:
            rule = state_of(self).rule or SOFTMAX
            weights = attention_weights(q, k, v, rule, scale=scale, attn_mask=mask).to(out.dtype)  # (B, H, N, M)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights


# Functions, not methods: another thread's recording may put the host's class back while this forward runs.


def _project(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module._qkv_same_embed_dim:
        assert module.in_proj_weight is not None
        if query is key and key is value:
            parts = F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
        else:
            weights = module.in_proj_weight.chunk(3)
            inputs = (query, key, value)
            parts = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        parts = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
    q, k, v = (part.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2) for part in parts)
    return q, k, v


def _extra_keys(
    module: nn.MultiheadAttention, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The learnt and the zero key that some modules add; every query may attend to them."""
    batch, heads, _, width = k.shape
    extra: list[tuple[Tensor, Tensor]] = []
    if module.bias_k is not None and module.bias_v is not None:
        shape = (1, 1, heads, width)
        learnt = [bias.view(shape).transpose(1, 2).expand(batch, -1, -1, -1) for bias in (module.bias_k, module.bias_v)]
        extra.append((learnt[0].to(k.dtype), learnt[1].to(v.dtype)))
    if module.add_zero_attn:
        extra.append((k.new_zeros(batch, heads, 1, width), v.new_zeros(batch, heads, 1, width)))
    for more_k, more_v in extra:
        k, v = torch.cat([k, more_k], dim=2), torch.cat([v, more_v], dim=2)
        if mask is not None:
            mask = F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
    return k, v, mask


def _forward_nested(module: nn.MultiheadAttention, query: Tensor, need_weights: bool) -> Tensor:
    """`nn.TransformerEncoder` packs padded batches as nested tensors: unpack, attend, pack again."""
    if need_weights:
        raise ValueError("attention weights of nested tensors are not supported: pass need_weights=False")
    lengths = torch.tensor([len(tokens) for tokens in query.unbind()], device=query.device)
    padded = torch.nested.to_padded_tensor(query, 0.0)  # (B, L, C)
    padding = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]  # (B, L)
    out, _ = module.forward(padded, padded, padded, key_padding_mask=padding, need_weights=False)
    packed = [tokens[:length] for tokens, length in zip(out, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(packed)


def _may_attend(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """One mask for SDPA, bool True = may attend or added to the scores, from torch's two that are True where masked."""
    batch, heads, length, _ = q.shape
    parts: list[Tensor] = []
    if attn_mask is not None:
        expected = (length, k.shape[2]) if attn_mask.dim() == 2 else (batch * heads, length, k.shape[2])
        if tuple(attn_mask.shape) != expected:
            raise ValueError(f"attn_mask has shape {tuple(attn_mask.shape)}, expected {expected}")
        lead = (batch, heads) if attn_mask.dim() == 3 else (1, 1)
        parts.append(attn_mask.view(*lead, length, k.shape[2]))
    if padding is not None:
        if tuple(padding.shape) != (batch, k.shape[2]):
            raise ValueError(f"key_padding_mask has shape {tuple(padding.shape)}, expected {(batch, k.shape[2])}")
        parts.append(padding[:, None, None, :])
    if not parts:
        return None
    if all(part.dtype == torch.bool for part in parts):
        masked = parts[0] if len(parts) == 1 else parts[0] | parts[1]
        return ~masked
    added = [
        torch.zeros_like(part, dtype=q.dtype).masked_fill_(part, -torch.inf) if part.dtype == torch.bool else part
        for part in parts
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


def is_tower(module: nn.Module) -> bool:
    """Whether `module` is torchvision's VisionTransformer; other torch models have no known layout."""
    return any(
        base.__module__ == "torchvision.models.vision_transformer" and base.__name__ == "VisionTransformer"
        for base in type(module).__mro__
    )


def site(name: str, module: nn.Module, parents: tuple[nn.Module, ...]) -> Site | str | None:
    """The site of an attention module, or why it is left alone, or None."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if type(module) not in (nn.MultiheadAttention, SelectiveMultiheadAttention):
        return f"{type(module).__qualname__} is a subclass of nn.MultiheadAttention with its own code"
    if any("Pool" in type(parent).__name__ for parent in parents):
        return POOLS
    edits = [Edit(module, "__class__", SelectiveMultiheadAttention)]
    parent = parents[-1] if parents else None
    if isinstance(parent, nn.TransformerEncoderLayer):
        # In eval the layer hands its weights to a native kernel and never calls the module; 0 is the layer's own
        # word for an activation that the kernel does not know.
        edits.append(Edit(parent, "activation_relu_or_gelu", 0))
    cross = isinstance(parent, nn.TransformerDecoderLayer) and parent.multihead_attn is module
    return Site(name, module, module.num_heads, "torch", tuple(edits), cross=cross, projection=module.out_proj)


def blocks(tower: Any) -> list[tuple[str, nn.Module]]:
    """The tower's transformer blocks in order, with their names in the tower."""
    return [(f"encoder.layers.{name}", block) for name, block in tower.encoder.layers.named_children()]


def tokens(tower: Any, images: Tensor, layer: int, norm: bool) -> Tokens:
    """The tokens that leave block `layer` of torchvision's ViT, at any image size."""
    side = tower.image_size // tower.patch_size
    grid = (images.shape[-2] // tower.patch_size, images.shape[-1] // tower.patch_size)
    block = pick_block(list(tower.encoder.layers), layer)
    positions = resize_positions(tower.encoder.pos_embedding, (side, side), grid, num_prefix=1)

    def run() -> Tensor:
        patches = tower.conv_proj(images).flatten(2).transpose(1, 2)  # (B, N, C)
        x = torch.cat([tower.class_token.expand(len(patches), -1, -1), patches], dim=1) + positions
        return tower.encoder.layers(tower.encoder.dropout(x))

    out = tap(block, run)
    return Tokens(tower.encoder.ln(out) if norm else out, num_prefix=1, has_cls=True, num_registers=0, grid=grid)


def preprocessing(tower: Any) -> Preprocessing:
    """ImageNet's mean and std, torchvision's convention for its weights."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return Preprocessing(mean, std, tower.patch_size, (tower.image_size, tower.image_size))
