"""Products with weights, joined with what follows them where oneDNN does both in one pass.

For inference on CPU. Beside the passes over memory it saves, oneDNN's float32 product outruns the library behind
`F.linear` on AMD processors (1.7 times or more on Zen 5). Everywhere else (training, autocast, torch.compile,
GPUs, tracing) the same formulas run as plain torch operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad


def product(
    x: Float[Tensor, "*lead i"],
    weight: Float[Tensor, "o i"],
    bias: Float[Tensor, " o"],
    residual: Float[Tensor, "*lead o"] | None = None,
) -> Float[Tensor, "*lead o"]:
    """X · weightᵀ + bias, and a residual on top.

    Args:
        x: (…, I).
        weight: (O, I).
        bias: (O,).
        residual: (…, O), or None.

    Returns:
        (…, O).

    Example:
        >>> product(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1), torch.ones(1, 1))
        tensor([[4.]])
    """
    if not onednn_serves(x, weight):
        out = F.linear(x, weight, bias)
        return out if residual is None else residual + out
    if residual is None or residual.dtype != x.dtype:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out if residual is None else residual + out
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


def gated_product(
    x: Float[Tensor, "*lead i"], weight: Float[Tensor, "o2 i"], bias: Float[Tensor, " o2"]
) -> Float[Tensor, "*lead o"]:
    """silu(a) ⊙ b with [a, b] = x · weightᵀ + bias: the first half of SwiGLU.

    Args:
        x: (…, I).
        weight: (2 O, I).
        bias: (2 O,).

    Returns:
        (…, O).

    Example:
        >>> gated_product(torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([1.0, 2.0]))
        tensor([[1.4621]])
    """
    if not onednn_serves(x, weight):
        a, b = F.linear(x, weight, bias).chunk(2, -1)
        return F.silu(a) * b
    half = weight.shape[0] // 2
    gate = torch.ops.mkldnn._linear_pointwise(x, weight[:half], bias[:half], "swish", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, gate, weight[half:], bias[half:], "mul")


def onednn_serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the joined products may be used: inference on CPU in float32 or bfloat16, nothing traced or wrapped."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.device.type != "cpu":
        return False
    return (
        x.dtype == weight.dtype
        and _supported(x.dtype)
        and x.numel() > 0
        and type(x) is Tensor
        and type(weight) in (Tensor, torch.nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def _supported(dtype: torch.dtype) -> bool:
    onednn = torch.ops.mkldnn  # its operators are torch's own affair: a build may lack them
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    if not hasattr(onednn, "_linear_pointwise"):
        return False
    bfloat16 = getattr(onednn, "_is_mkldnn_bf16_supported", lambda: False)
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bfloat16())
