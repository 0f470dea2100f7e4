"""Images in, dense features out, for every model that a file of `swap` knows, and for our own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.models.veca import Veca
from selectivit.swap.sites import Preprocessing, Tower, find_tower, unwrap
from selectivit.swap.tap import pick_block, together

__all__ = ["Features", "Preprocessing", "block_features", "features", "num_blocks", "preprocessing"]


@dataclass(frozen=True)
class Features:
    """Tokens of one block, sorted by what they are.

    Args:
        map: (B, C, h, w), the patch tokens in their places.
        patch_tokens: (B, h * w, C), row by row.
        cls: (B, C), or None where the model has no class token; of a core-periphery model its first core.
        registers: (B, R, C), or None where it has none.
        cores: (B, C', C), or None; only core-periphery models have them.
        grid: (h, w) in patches.
    """

    map: Tensor
    patch_tokens: Tensor
    cls: Tensor | None
    registers: Tensor | None
    cores: Tensor | None
    grid: tuple[int, int]


def features(
    model: nn.Module, images: Tensor, *, layer: int = -1, norm: bool = True, num_cores: int | None = None
) -> Features:
    """The tokens that leave one block of a Vision Transformer, softmax or swapped.

    Any image size works: position embeddings are interpolated by the host's own rule where it has one. Sizes that
    are no multiple of the patch are resized (bilinear, antialiased) to the nearest multiple, or padded by a VECA model
    made with pad=True. Gradients flow unless
    the caller turns them off; blocks after `layer` are not run.

    Args:
        model: a timm, open_clip, transformers or torchvision Vision Transformer, a VECA model, or one that holds such
            a tower.
        images: (B, 3, H, W) or (3, H, W), floating, normalised as the model expects (see `preprocessing`).
        layer: which block, negatives from the end.
        norm: apply the model's final norm over tokens. Models that norm after pooling (timm with `fc_norm`, CoCa)
            have none, and their tokens come as they are. CLIP's tokens are those before the projection.
        num_cores: the budget of a VECA model; None is its whole bank.

    Returns:
        The features, in the model's dtype. A distillation token is among neither cls nor registers.

    Raises:
        ValueError: for images of another shape, a block out of range, a budget outside the bank or for a model that
            has none, or a model without a known image tower.
        TypeError: for images of integers.

    Example:
        >>> import torch, torchvision
        >>> vit = torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32).eval()
        >>> f = features(vit, torch.randn(1, 3, 32, 48))
        >>> f.map.shape, f.grid
        (torch.Size([1, 16, 2, 3]), (2, 3))
    """
    return block_features(model, images, [layer], norm=norm, num_cores=num_cores)[0]


def block_features(
    model: nn.Module, images: Tensor, layers: Sequence[int], *, norm: bool = True, num_cores: int | None = None
) -> list[Features]:
    """The tokens that leave several blocks, in one forward.

    Args:
        model: as for `features`.
        images: as for `features`.
        layers: which blocks, negatives from the end.
        norm: as for `features`; the same final norm for every block.
        num_cores: as for `features`.

    Returns:
        For each block what `features` gives.

    Raises:
        ValueError: as `features`, and for no blocks at all.
        TypeError: for images of integers.

    Example:
        >>> import torch, torchvision
        >>> vit = torchvision.models.VisionTransformer(32, 16, 2, 2, 16, 32).eval()
        >>> x = torch.randn(1, 3, 32, 48)
        >>> first, last = block_features(vit, x, [0, -1])
        >>> torch.equal(last.map, features(vit, x).map)
        True
    """
    if not layers:
        raise ValueError("expected at least one block")
    tower = _tower(model)
    blocks = _blocks(tower)
    picked = [pick_block(blocks, layer) for layer in layers]
    order = sorted(range(len(layers)), key=lambda i: blocks.index(picked[i]), reverse=True)
    if isinstance(tower, Veca):
        images = _as_batch(images, tower, 1 if tower.config.pad else tower.config.patch_size)  # it pads for itself
        return _veca_features(tower, images, [picked[i] for i in order], order, norm, num_cores)
    if num_cores is not None:
        raise ValueError(f"num_cores is a budget of cores, which {type(tower.module).__name__} does not have")
    images = _as_batch(images, tower.module, tower.host.preprocessing(tower.module).patch_size)
    if len(layers) == 1:  # nothing to remember: one hook that ends the forward
        return [_host_features(tower, images, layers[0], norm)]
    with together(picked):
        found = {i: _host_features(tower, images, layers[i], norm) for i in order}  # the last block first
    return [found[i] for i in range(len(layers))]


def num_blocks(model: nn.Module) -> int:
    """How many blocks the image tower has.

    Args:
        model: as for `features`.

    Returns:
        Their number.

    Raises:
        ValueError: a model without a known image tower.

    Example:
        >>> import torchvision
        >>> num_blocks(torchvision.models.VisionTransformer(32, 16, 3, 2, 16, 32))
        3
    """
    return len(_blocks(_tower(model)))


def _blocks(tower: Tower | Veca) -> list[nn.Module]:
    return list(tower.blocks) if isinstance(tower, Veca) else [b for _, b in tower.host.blocks(tower.module)]


def _host_features(tower: Tower, images: Tensor, layer: int, norm: bool) -> Features:
    found = tower.host.tokens(tower.module, images, layer, norm)
    height, width = found.grid
    tokens = found.tokens  # (B, L, C)
    if tokens.shape[1] != found.num_prefix + height * width:
        raise ValueError(
            f"expected {found.num_prefix} + {height} x {width} tokens, the block handed on {tokens.shape[1]}: patch "
            "dropout or token merging leaves no map"
        )
    prefix, patches = tokens[:, : found.num_prefix], tokens[:, found.num_prefix :]
    return Features(
        map=patches.transpose(1, 2).unflatten(2, (height, width)),
        patch_tokens=patches,
        cls=prefix[:, 0] if found.has_cls else None,
        registers=prefix[:, -found.num_registers :] if found.num_registers else None,
        cores=None,
        grid=found.grid,
    )


def preprocessing(model: nn.Module) -> Preprocessing:
    """The mean, std, patch size and image size that a model expects.

    Args:
        model: as for `features`.

    Returns:
        From the model's own configuration where it says so, else the convention of its family.

    Raises:
        ValueError: for a model without a known image tower.

    Example:
        >>> import torchvision
        >>> preprocessing(torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32)).patch_size
        16
    """
    tower = _tower(model)
    if isinstance(tower, Veca):
        config = tower.config
        return Preprocessing(config.mean, config.std, config.patch_size, (config.image_size, config.image_size))
    return tower.host.preprocessing(tower.module)


def _veca_features(
    model: Veca, images: Tensor, blocks: Sequence[nn.Module], order: Sequence[int], norm: bool, num_cores: int | None
) -> list[Features]:
    """The features of blocks, the last one first; `order` holds the place of each in the answer."""
    outputs: dict[nn.Module, Tensor] = {}

    def note(block: nn.Module, _inputs: Any, tokens: Tensor) -> None:
        outputs[block] = tokens

    hooks = [block.register_forward_hook(note) for block in blocks[1:]]
    last = list(model.blocks).index(blocks[0])
    try:
        tokens, count, grid = model.block_tokens(images, num_cores, layer=last, norm=norm)  # (B, C' + N, C)
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for place, block in zip(order, blocks, strict=True):
        if block is not blocks[0]:
            tokens = model.norm(outputs[block]) if norm else outputs[block]
        cores, patches = tokens[:, :count], tokens[:, count:]
        shape = patches.transpose(1, 2).unflatten(2, grid)
        found[place] = Features(shape, patches, cls=cores[:, 0], registers=None, cores=cores, grid=grid)
    return [found[place] for place in range(len(order))]


def _tower(model: nn.Module) -> Tower | Veca:
    ours = [module for module in unwrap(model).modules() if isinstance(module, Veca)]
    tower = find_tower(model)
    found = [*ours, *([] if tower is None else [tower.module])]
    if len(found) > 1:
        kinds = ", ".join(type(module).__name__ for module in found)
        raise ValueError(f"expected one image tower, found {len(found)} ({kinds}): pass the one you mean")
    if ours:
        return ours[0]
    if tower is None:
        raise ValueError(
            f"no image tower found in {type(model).__name__}: expected a Vision Transformer of timm, open_clip, "
            "transformers or torchvision, or a VECA model"
        )
    return tower


def _as_batch(images: Any, tower: nn.Module, patch: int) -> Tensor:
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"expected a floating tensor of normalised images, got {kind}")
    if images.ndim not in (3, 4) or images.shape[-3] != 3 or 0 in images.shape:
        raise ValueError(f"expected images of shape (B, 3, H, W) or (3, H, W), got {tuple(images.shape)}")
    images = images if images.ndim == 4 else images[None]
    if any(side % patch for side in images.shape[-2:]):
        height, width = (max(1, round(side / patch)) * patch for side in images.shape[-2:])
        images = F.interpolate(images, size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    parameter = next(tower.parameters())
    return images if torch.is_autocast_enabled(images.device.type) else images.to(parameter.dtype)
