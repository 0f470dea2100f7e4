"""Attention of short sequences on the CPU: three plain products are faster in bfloat16 than torch's fused kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

LONGEST = 1600
"""Tokens up to which the whole matrix of weights is kept: 40 x 40 patches."""


@contextmanager
def plain_attention(device: torch.device, tokens: int) -> Iterator[None]:
    """Let `scaled_dot_product_attention` be three products where that is faster.

    Forward and backward of 257 tokens take 0.4 of the fused kernel's time on AVX-512 BF16 (measured here), at the price
    of keeping the weights, which sequences beyond `LONGEST` tokens cannot afford.

    Args:
        device: where to compute.
        tokens: of a sequence.

    Returns:
        A context manager; it changes nothing off the CPU, without bfloat16 autocast, or for long sequences.

    Example:
        >>> with plain_attention(torch.device("cpu"), 257):
        ...     pass
    """
    low = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    if device.type != "cpu" or not low or tokens > LONGEST:
        yield
        return
    switch = torch.backends.cuda  # the name is historical: the switch is the CPU's as well
    before = switch.fp16_bf16_reduction_math_sdp_allowed()
    switch.allow_fp16_bf16_reduction_math_sdp(True)  # else it would compute in float32
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        switch.allow_fp16_bf16_reduction_math_sdp(before)
