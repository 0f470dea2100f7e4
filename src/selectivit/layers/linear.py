"""Linear layers, joined with what follows them only where they are nothing but their weight and bias.

Where something stands in for a layer (an adapter, a quantised one) or listens to it (hooks), the module is called, so
that whatever it adds takes part.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from selectivit.ops.products import gated_product, product

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def linear(
    layer: nn.Module, x: Float[Tensor, "*lead i"], residual: Float[Tensor, "*lead o"] | None = None
) -> Float[Tensor, "*lead o"]:
    """A linear layer, and a residual on top.

    Args:
        layer: `nn.Linear`, or whatever stands in its place.
        x: (…, I).
        residual: (…, O), or None.

    Returns:
        (…, O).

    Example:
        >>> linear(nn.Linear(4, 3), torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """
    if is_bare(layer):
        return product(x, layer.weight, layer.bias, residual)  # pyright: ignore[reportArgumentType]
    out = layer(x)
    return out if residual is None else residual + out


def gated_linear(layer: nn.Module, x: Float[Tensor, "*lead i"]) -> Float[Tensor, "*lead o"]:
    """silu(a) ⊙ b with [a, b] = layer(x): the first half of SwiGLU.

    Args:
        layer: `nn.Linear` of 2 O outputs, or whatever stands in its place.
        x: (…, I).

    Returns:
        (…, O).

    Example:
        >>> gated_linear(nn.Linear(4, 6), torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """
    if is_bare(layer):
        return gated_product(x, layer.weight, layer.bias)  # pyright: ignore[reportArgumentType]
    a, b = layer(x).chunk(2, -1)
    return F.silu(a) * b


def is_bare(layer: nn.Module) -> bool:
    """Whether calling a layer is nothing but x · weightᵀ + bias.

    Args:
        layer: any module.

    Returns:
        False for subclasses, wrappers, layers without bias, and where a hook or a forward of its own is set.

    Example:
        >>> is_bare(nn.Linear(2, 2)), is_bare(nn.Sequential(nn.Linear(2, 2)))
        (True, False)
    """
    if type(layer) is not nn.Linear or layer.bias is None or "forward" in layer.__dict__:
        return False
    return not any(getattr(layer, name) for name in HOOKS) and not torch_module._has_any_global_hook()
