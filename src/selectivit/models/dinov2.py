"""DINOv2 as its authors run it: timm's VisionTransformer with the position table resized as in training."""

from __future__ import annotations

import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


class DINOv2(VisionTransformer):
    """timm's VisionTransformer, but its position table is resized by plain bicubic interpolation.

    timm blurs (antialiases) the table when the image has fewer patches than the table; the authors' code, transformers
    and exported graphs do not. At 224 px this moves single features by up to 1; at the table's own size, 518 px, and
    above there is no difference.

    Source: DINOv2 (arXiv 2304.07193); `interpolate_antialias=False` in its released code.
    """

    def _pos_embed(self, x: Tensor) -> Tensor:
        assert self.pos_embed is not None and self.cls_token is not None
        batch, *grid, _ = x.shape  # (B, h, w, C)
        positions = resample_abs_pos_embed(
            self.pos_embed, new_size=grid, old_size=self.patch_embed.grid_size, num_prefix_tokens=1, antialias=False
        )
        tokens = torch.cat([self.cls_token.expand(batch, -1, -1), x.flatten(1, 2)], dim=1)  # (B, 1 + h * w, C)
        return self.pos_drop(tokens + positions)


def as_dinov2(model: VisionTransformer) -> DINOv2:
    """Make a timm DINOv2 without registers resize its position table as its authors do.

    Args:
        model: from timm, with a class token, no registers and dynamic_img_size=True; changed in place.

    Returns:
        The same object.

    Raises:
        ValueError: a model of another layout.
    """
    if not (model.dynamic_img_size and model.num_prefix_tokens == 1 and not model.no_embed_class):
        raise ValueError("expected a timm DINOv2 without registers, made with dynamic_img_size=True")
    model.__class__ = DINOv2
    assert isinstance(model, DINOv2)
    return model
