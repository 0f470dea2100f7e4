"""Axial rotary embeddings in two dimensions: pairs of features turn by an angle that grows with x or y.

The first half of a head turns with x, the second with y. Of the n = D/4 frequencies of an axis the last eighth, the
lowest, stand still, so that a part of every head compares content alone.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

BASE = 100.0
STILL = 0.125  # share of the frequencies that do not turn
KEPT_TENSORS = 32  # image sizes and head widths at a time

_kept: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()
_lock = threading.Lock()


def axial_rotations(coords: Float[Tensor, "*lead n 2"], head_dim: int) -> Float[Tensor, "*lead n pairs 2"]:
    """Cosine and sine of every pair of features at some places.

    Args:
        coords: (…, N, 2), x and y in [−1, 1]; learnable.
        head_dim: D, a multiple of 4.

    Returns:
        (…, N, D/2, 2): cos and sin of 2π · coordinate / 100^(i/n), first all i of x, then all of y.

    Raises:
        ValueError: a head that is no multiple of 4 wide.

    Example:
        >>> axial_rotations(torch.zeros(1, 2), head_dim=4)
        tensor([[[1., 0.],
                 [1., 0.]]])

    Source: RoFormer, arXiv 2104.09864; axial with frozen low frequencies, VECA, arXiv 2605.12491.
    """
    check_head_dim(head_dim)
    key = ("frequencies", head_dim, coords.device, coords.dtype)
    frequencies = _once(key, lambda: _frequencies(head_dim // 4, coords.device, coords.dtype))
    angles = (coords[..., None] * frequencies).flatten(-2)  # (…, N, 2, n) to (…, N, D/2)
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotate(
    tokens: Float[Tensor, "*lead n h d"], rotations: Float[Tensor, "*rest n pairs 2"]
) -> Float[Tensor, "*lead n h d"]:
    """Turn the pairs (0, 1), (2, 3), … of every head.

    Args:
        tokens: (B, N, H, D).
        rotations: (N, D/2, 2) or (B, N, D/2, 2), from `axial_rotations`.

    Returns:
        (B, N, H, D) in the tokens' dtype; computed in float32, float64 for float64.

    Example:
        >>> rotate(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]]))
        tensor([[[0., 1.]]])
    """
    turned = rotations.unsqueeze(-3)  # (…, N, 1, D/2, 2)
    wide = tokens.to(turned.dtype).unflatten(-1, (-1, 2))  # (B, N, H, D/2, 2)
    if _complex_serves(tokens):
        out = torch.view_as_real(torch.view_as_complex(wide) * torch.view_as_complex(turned))
    else:
        (a, b), (cos, sin) = wide.unbind(-1), turned.unbind(-1)
        out = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    return out.flatten(-2).to(tokens.dtype)


def rotate_(tokens: Float[Tensor, "*lead n h d"], rotations: Float[Tensor, "*rest n pairs 2"]) -> Tensor:
    """As `rotate`, written over the tokens: a pass over memory instead of three. For use where no gradient is wanted.

    Args:
        tokens: (B, N, H, D), overwritten.
        rotations: (N, D/2, 2) or (B, N, D/2, 2).

    Returns:
        The tokens.

    Example:
        >>> rotate_(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]]))
        tensor([[[0., 1.]]])
    """
    if not (_complex_serves(tokens) and tokens.dtype == rotations.dtype):
        return tokens.copy_(rotate(tokens, rotations))
    torch.view_as_complex(tokens.unflatten(-1, (-1, 2))).mul_(torch.view_as_complex(rotations).unsqueeze(-2))
    return tokens


def patch_coordinates(grid: tuple[int, int], device: torch.device | str | None = None) -> Float[Tensor, "n 2"]:
    """The middle of every patch, row by row.

    Args:
        grid: (h, w) in patches.
        device: where the tensor is made.

    Returns:
        (h * w, 2) float64: x and y, each in (−1, 1) over the whole side, whatever the aspect.

    Example:
        >>> patch_coordinates((1, 2))
        tensor([[-0.5000,  0.0000],
                [ 0.5000,  0.0000]], dtype=torch.float64)
    """
    y, x = ((torch.arange(side, device=device, dtype=torch.float64) + 0.5) / side * 2 - 1 for side in grid)
    return torch.cartesian_prod(y, x).flip(-1)


def patch_rotations(
    grid: tuple[int, int], head_dim: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n pairs 2"]:
    """Cosine and sine of all patches of an image, computed once per size and kept for the last few sizes.

    Args:
        grid: (h, w) in patches.
        head_dim: D.
        device: where they are wanted.
        dtype: float32, or float64.

    Returns:
        (h * w, D/2, 2); shared by all callers, not to be written to.

    Example:
        >>> patch_rotations((2, 3), 8, torch.device("cpu")).shape
        torch.Size([6, 4, 2])
    """

    def make() -> Tensor:
        return axial_rotations(patch_coordinates(grid, device), head_dim).to(dtype)

    return _once(("patches", *grid, head_dim, device, dtype), make)


def moved_coordinates(coords: Float[Tensor, "n 2"], shift: float, scale: float) -> Float[Tensor, "n 2"]:
    """Patch coordinates for training: shifted along both axes, then scaled, by one draw for the whole batch.

    Args:
        coords: (N, 2).
        shift: the shift of each axis is uniform in ±shift.
        scale: the factor is log-uniform in [1/scale, scale].

    Returns:
        (N, 2).

    Example:
        >>> moved_coordinates(torch.ones(1, 2), shift=0.0, scale=1.0)
        tensor([[1., 1.]])
    """
    draw = torch.rand(3, device=coords.device, dtype=coords.dtype) * 2 - 1  # in [−1, 1)
    return (coords + shift * draw[:2]) * (math.log(scale) * draw[2]).exp()


def check_head_dim(head_dim: int) -> None:
    """Raise a ValueError for a head whose width does not split into pairs of x and of y."""
    if head_dim < 4 or head_dim % 4:
        raise ValueError(f"axial rotary embeddings need heads of a multiple of 4 wide, got {head_dim}")


def _frequencies(n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    steps = torch.arange(n, device=device, dtype=torch.float64)
    turning = n - round(STILL * n)
    return (2 * math.pi * BASE ** (-steps / n)).masked_fill(steps >= turning, 0.0).to(dtype)


def _once(key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """The tensor kept under a key, made when it is not there; the least recently used give way."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # a traced tensor must not be kept
        return make()
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
            return found
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be used in training later
        found = make()
    with _lock:
        _kept[key] = found
        while len(_kept) > KEPT_TENSORS:
            _kept.popitem(last=False)
    return found


def _complex_serves(tokens: Tensor) -> bool:
    """Whether one complex product is the fastest way: the compiler fuses the plain products but no complex ones."""
    return tokens.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling()
