"""The shape of a ViT for DINO, and the published sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from selectivit.ops.core_attention import rule_of

SPECIALIZED = {"none": 0.0, "third": 1 / 3, "half": 1 / 2}
"""Name -> share of the blocks, from the first on, in which the class token has weights of its own."""


@dataclass(frozen=True)
class DinoVitConfig:
    """The shape of a Vision Transformer as DINO trains it, and of the variants that keep its patches sharp.

    Args:
        dim: width of the tokens.
        depth: number of blocks.
        num_heads: H, which divides dim.
        patch_size: side of a patch, pixels.
        image_size: pixels a side that the table of positions is made for, whole patches; any other size works too.
        attention: "softmax", "entmax15", "sparsemax", or entmax's α as a number; in every block.
        registers: learnt tokens beside the class token, dropped at the output.
        specialization: blocks, from the first on, in which norms, LayerScale and the projections of q, k and v have
            weights for the class token and others for all other tokens: a number, "third" or "half" of the depth
            (the two published depths), or "none".
        layer_scale: what LayerScale starts with; None has none, save in specialized blocks, where it starts with 1.
        drop_path: training only: chance of skipping a block's half for an image, rising to this in the last block.

    Raises:
        ValueError: numbers outside these, or an unknown name.
        TypeError: a count that is no whole number.

    Example:
        >>> DinoVitConfig(specialization="third").specialization
        4
    """

    dim: int = 384
    depth: int = 12
    num_heads: int = 6
    patch_size: int = 16
    image_size: int = 224
    attention: str | float = "softmax"
    registers: int = 0
    specialization: str | int = 0
    layer_scale: float | None = None
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.specialization, str):
            if self.specialization not in SPECIALIZED:
                raise ValueError(
                    f"expected specialization as a number of blocks or one of {', '.join(SPECIALIZED)}, got "
                    f"{self.specialization!r}"
                )
            object.__setattr__(self, "specialization", round(self.depth * SPECIALIZED[self.specialization]))
        least = {"dim": 1, "depth": 1, "num_heads": 1, "patch_size": 1, "image_size": 1}
        for name, low in {**least, "registers": 0, "specialization": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"expected {name} as a whole number, got {value!r}")
            if value < low:
                raise ValueError(f"expected {name} of at least {low}, got {value}")
        if self.dim % self.num_heads:
            raise ValueError(f"expected a number of heads that divides dim {self.dim}, got {self.num_heads}")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"expected image_size in whole patches of {self.patch_size} px, got {self.image_size}: "
                f"{max(1, self.image_size // self.patch_size) * self.patch_size} is one"
            )
        if int(self.specialization) > self.depth:
            raise ValueError(f"expected specialization of up to {self.depth} blocks, got {self.specialization}")
        if self.layer_scale is not None and not 0 < self.layer_scale < math.inf:
            raise ValueError(f"expected layer_scale above 0 or None, got {self.layer_scale}")
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"expected drop_path of 0 or more and below 1, got {self.drop_path}")
        rule_of(self.attention)


DINO_SIZES = {
    "tiny": DinoVitConfig(dim=192, num_heads=3),
    "small": DinoVitConfig(),
    "base": DinoVitConfig(dim=768, num_heads=12),
}
