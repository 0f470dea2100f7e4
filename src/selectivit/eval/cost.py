"""What a forward costs, by formula: products, parameters and memory of VECA and of a plain Vision Transformer.

One multiplication with its addition counts as two FLOPs, as in `torch.utils.flop_counter`. What is not a product of
matrices (norms, softmax, activations, rotary embeddings) is left out: it is linear in the tokens and waits for memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from selectivit.models.veca_config import VecaConfig


@dataclass(frozen=True)
class Cost:
    """The cost of one image.

    Args:
        embedding: FLOPs of the patch embedding.
        products: FLOPs of the linear layers.
        attention: FLOPs of scores and of mixing the values.
        parameters: their number.
        activation_bytes: the most that lives at once in an inference forward beyond parameters and image, as plain
            torch operators; the joined products of `ops/products.py` need about half of it.
    """

    embedding: int
    products: int
    attention: int
    parameters: int
    activation_bytes: int

    @property
    def trunk(self) -> int:
        """FLOPs of the blocks."""
        return self.products + self.attention

    @property
    def flops(self) -> int:
        """FLOPs of the whole model."""
        return self.embedding + self.trunk


@dataclass(frozen=True)
class ViTShape:
    """A plain Vision Transformer with GELU, biases everywhere and rotary embeddings, as DINOv3's smaller sizes.

    Args:
        dim: width of the tokens.
        depth: number of blocks.
        num_heads: H.
        mlp_ratio: hidden width of the feed-forward layer over dim.
        patch_size: side of a patch, pixels.
        num_prefix_tokens: class token and registers.
        layer_scale: two factors per feature and block.
        qkv_bias: whether queries, keys and values have a bias.
    """

    dim: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    patch_size: int = 16
    num_prefix_tokens: int = 5
    layer_scale: bool = True
    qkv_bias: bool = False


DINOV3 = {
    "small": ViTShape(384, 12, 6),
    "base": ViTShape(768, 12, 12),
    "large": ViTShape(1024, 24, 16),
}


def veca_cost(
    config: VecaConfig, image_size: tuple[int, int], num_cores: int | None = None, *, element_bytes: int = 4
) -> Cost:
    """The cost of VECA at a budget.

    Args:
        config: of the model; `SIZES` holds the published ones.
        image_size: (height, width), pixels.
        num_cores: the budget; None is the whole bank.
        element_bytes: 4 for float32, 2 for bfloat16.

    Returns:
        FLOPs and activations at this budget; parameters of the whole bank.

    Raises:
        ValueError: a budget outside the bank, or an image of no whole patches where the model does not pad.

    Example:
        >>> from selectivit.models.veca_config import SIZES
        >>> round(veca_cost(SIZES["small"], (1024, 1024), 64).flops / 1e9)
        189
    """
    cores = config.num_cores if num_cores is None else num_cores
    if not 1 <= cores <= config.num_cores:
        raise ValueError(f"expected a budget of 1 to {config.num_cores} cores, got {cores}")
    patches = _patches(image_size, config.patch_size, config.pad)
    dim, hidden, depth, out = config.dim, config.hidden_dim, config.depth, config.out_dim or 0
    tokens = cores + patches
    pixels = 3 * config.patch_size**2
    products = depth * tokens * (4 * dim * dim + 3 * dim * hidden)
    products += (depth - 1) * cores * dim * 2 + (1 + patches) * dim * out
    attention = depth * 2 * dim * (cores * tokens + patches * cores)
    block = 4 * dim * (dim + 1) + (dim + 1) * 2 * hidden + (hidden + 1) * dim + 4 * dim
    bank = config.num_cores * (dim + 2) + (depth - 1) * (2 * dim + 3)
    parameters = (pixels + 1) * dim + bank + depth * block + 2 * dim + out * (dim + 1)
    activations = element_bytes * tokens * _widest(dim, 4 * hidden)  # a, b, silu(a) and the product
    return Cost(2 * patches * pixels * dim, 2 * products, 2 * attention, parameters, activations)


def vit_cost(shape: ViTShape, image_size: tuple[int, int], *, element_bytes: int = 4) -> Cost:
    """The cost of a plain Vision Transformer without a head, attention fused.

    Args:
        shape: `DINOV3` holds those that VECA is measured against.
        image_size: (height, width), pixels.
        element_bytes: 4 for float32, 2 for bfloat16.

    Returns:
        Its cost.

    Raises:
        ValueError: an image of no whole patches.

    Example:
        >>> round(vit_cost(DINOV3["small"], (1024, 1024)).flops / 1e9)
        487
    """
    patches = _patches(image_size, shape.patch_size, pad=False)
    dim, hidden = shape.dim, int(shape.dim * shape.mlp_ratio)
    tokens, pixels = shape.num_prefix_tokens + patches, 3 * shape.patch_size**2
    products = shape.depth * tokens * (4 * dim * dim + 2 * dim * hidden)
    attention = shape.depth * 2 * dim * tokens * tokens
    block = 4 * dim * (dim + 1) + (dim + 1) * hidden + (hidden + 1) * dim + 4 * dim
    block += 2 * dim * shape.layer_scale - 3 * dim * (not shape.qkv_bias)
    parameters = (pixels + 1) * dim + shape.num_prefix_tokens * dim + shape.depth * block + 2 * dim
    activations = element_bytes * tokens * _widest(dim, 2 * hidden)  # before and after GELU
    return Cost(2 * patches * pixels * dim, 2 * products, 2 * attention, parameters, activations)


def flop_ratio(size: str, config: VecaConfig, image_size: tuple[int, int], num_cores: int | None = None) -> float:
    """FLOPs of DINOv3's blocks over those of VECA: the bound for the ratio of their times.

    Args:
        size: of DINOv3, "small", "base" or "large".
        config: of VECA.
        image_size: (height, width), pixels.
        num_cores: the budget; None is the whole bank.

    Returns:
        Above 1 where VECA does less.

    Example:
        >>> from selectivit.models.veca_config import SIZES
        >>> round(flop_ratio("small", SIZES["small"], (1024, 1024)), 1)
        2.6
    """
    trunk = dataclasses.replace(config, out_dim=None)
    return vit_cost(DINOV3[size], image_size).trunk / veca_cost(trunk, image_size, num_cores).trunk


def _widest(dim: int, feed_forward: int) -> int:
    """Elements a token at the widest moment: the block's input, the residual and its norm, with the rest of a layer."""
    return 3 * dim + max(4 * dim, feed_forward)  # of attention: qkv and the output


def _patches(image_size: tuple[int, int], patch_size: int, pad: bool) -> int:
    height, width = image_size
    if min(height, width) < 1 or (not pad and (height % patch_size or width % patch_size)):
        raise ValueError(f"expected sides of whole patches of {patch_size} px, got {height} x {width}")
    return -(-height // patch_size) * -(-width // patch_size)
