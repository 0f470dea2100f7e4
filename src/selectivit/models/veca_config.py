"""The shape of a VECA model, and the published sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class VecaConfig:
    """The shape of a VECA model and what it expects of its images.

    Args:
        dim: width of the tokens.
        depth: number of blocks.
        num_heads: H; dim / H is a multiple of 4.
        hidden_dim: of SwiGLU.
        num_cores: size of the core bank, the largest budget.
        patch_size: side of a patch, pixels.
        out_dim: width of the teacher's features, where the outputs are projected to it; None projects nothing.
        attention: "softmax", "entmax15", "sparsemax", or entmax's α as a number.
        pad: pad images of a size that is no multiple of the patch with zeros at the right and bottom, instead of
            refusing them.
        coord_shift: training only: patch coordinates are shifted by up to this along each axis; 0 turns it off.
        coord_scale: training only: and scaled by a factor in [1/coord_scale, coord_scale]; 1 turns it off.
        image_size: pixels a side the model was trained on; any other size works too.
        mean: per channel, subtracted from values in [0, 1] by the caller.
        std: per channel, divides what is left.

    Example:
        >>> VecaConfig(dim=64, num_heads=1).depth
        12
    """

    dim: int = 384
    depth: int = 12
    num_heads: int = 6
    hidden_dim: int = 1024
    num_cores: int = 64
    patch_size: int = 16
    out_dim: int | None = None
    attention: str | float = "softmax"
    pad: bool = False
    coord_shift: float = 0.08
    coord_scale: float = 2.0
    image_size: int = 256
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        counts = ["dim", "depth", "num_heads", "hidden_dim", "num_cores", "patch_size", "image_size"]
        for name in [*counts, *(["out_dim"] if self.out_dim is not None else [])]:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"expected {name} as a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")
        if not isinstance(self.attention, (str, int, float)) or isinstance(self.attention, bool):
            raise TypeError(f"expected attention as a name or a number, got {self.attention!r}")
        if not (0 <= self.coord_shift < math.inf and 1 <= self.coord_scale < math.inf):
            raise ValueError(
                f"expected coord_shift >= 0 and coord_scale >= 1, got {self.coord_shift} and {self.coord_scale}"
            )
        object.__setattr__(self, "mean", tuple(self.mean))  # JSON knows lists only
        object.__setattr__(self, "std", tuple(self.std))


SIZES = {
    "tiny": VecaConfig(dim=192, num_heads=3, hidden_dim=512),
    "small": VecaConfig(),
    "small_plus": VecaConfig(hidden_dim=1536),
    "base": VecaConfig(dim=768, num_heads=12, hidden_dim=2048),
    "large": VecaConfig(dim=1024, depth=24, num_heads=16, hidden_dim=2730),
}
