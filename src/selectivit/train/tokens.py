"""A global token and patch tokens of any model, differentiable, and how a student's meet a teacher's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selectivit.features import features
from selectivit.models.veca import Veca

GRIDS = ("refuse", "interpolate")


@dataclass(frozen=True)
class DenseTokens:
    """What a distillation compares.

    Args:
        global_token: (B, C).
        patch_tokens: (B, h * w, C), row by row.
        grid: (h, w) in patches.
    """

    global_token: Tensor
    patch_tokens: Tensor
    grid: tuple[int, int]


def dense_tokens(model: nn.Module, images: Tensor, num_cores: int | None = None) -> DenseTokens:
    """The tokens that a model gives, with gradients unless the caller turned them off.

    The global token is the class token; of a core-periphery model core 0; where a model has neither, the mean of its
    patches. A core-periphery model with an output projection gives the projected tokens.

    Args:
        model: any that `features` knows.
        images: (B, 3, H, W), normalised as the model expects.
        num_cores: the budget of a core-periphery model; None is all of its cores.

    Returns:
        The tokens after the last block and the final norm.

    Raises:
        ValueError: a budget for a model without cores, or what `features` refuses.

    Example:
        >>> import torchvision
        >>> vit = torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32).eval()
        >>> dense_tokens(vit, torch.randn(1, 3, 32, 32)).patch_tokens.requires_grad
        True
    """
    if isinstance(model, Veca):
        out = model(images, num_cores)
        if out.projected_cls is not None and out.projected_patches is not None:
            return DenseTokens(out.projected_cls, out.projected_patches, out.grid)
        return DenseTokens(out.cls, out.patch_tokens, out.grid)
    if num_cores is not None:
        raise ValueError(f"{type(model).__name__} has no cores: a budget of {num_cores} means nothing to it")
    found = features(model, images)
    whole = found.patch_tokens.mean(1) if found.cls is None else found.cls
    return DenseTokens(whole, found.patch_tokens, found.grid)


def to_grid(tokens: DenseTokens, grid: tuple[int, int], how: str) -> DenseTokens:
    """Bring a teacher's patches to the student's grid.

    Args:
        tokens: the teacher's.
        grid: the student's (h, w).
        how: "refuse" or "interpolate" (bilinear, antialiased).

    Returns:
        Tokens of that grid; the same where the grids agree.

    Raises:
        ValueError: grids that differ where that is refused, or another `how`.

    Example:
        >>> tokens = DenseTokens(torch.ones(1, 4), torch.ones(1, 6, 4), (2, 3))
        >>> to_grid(tokens, (4, 6), "interpolate").patch_tokens.shape
        torch.Size([1, 24, 4])
    """
    if how not in GRIDS:
        raise ValueError(f"expected grid to be one of {', '.join(GRIDS)}, got {how!r}")
    if tokens.grid == grid:
        return tokens
    if how == "refuse":
        raise ValueError(
            f"the teacher's grid is {tokens.grid[0]} x {tokens.grid[1]} patches, the student's {grid[0]} x {grid[1]}: "
            "take models of the same patch size, or allow grid='interpolate'"
        )
    maps = tokens.patch_tokens.float().transpose(1, 2).unflatten(2, tokens.grid)  # (B, C, h, w)
    maps = F.interpolate(maps, size=grid, mode="bilinear", antialias=True, align_corners=False)
    return DenseTokens(tokens.global_token, maps.flatten(2).transpose(1, 2), grid)


def project(tokens: DenseTokens, head: nn.Module) -> DenseTokens:
    """Pass global and patch tokens through one head.

    Args:
        tokens: the student's.
        head: a linear map, or an identity.

    Returns:
        Tokens of the head's width.
    """
    return DenseTokens(head(tokens.global_token), head(tokens.patch_tokens), tokens.grid)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """From 8-bit pixels to what a model takes.

    Args:
        images: (B, 3, H, W) uint8.
        mean: per channel, of values in [0, 1].
        std: per channel.

    Returns:
        float32.

    Example:
        >>> normalise(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8), (0.5,) * 3, (0.5,) * 3).max()
        tensor(1.)
    """
    centre = torch.tensor(mean, device=images.device).mul_(255).view(3, 1, 1)
    spread = torch.tensor(std, device=images.device).mul_(255).view(3, 1, 1)
    return images.float().sub_(centre).div_(spread)
