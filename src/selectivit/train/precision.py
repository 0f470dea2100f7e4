"""What to compute in."""

from __future__ import annotations

import torch


def resolve_precision(precision: str, device: str) -> str:
    """Choose what to compute in.

    Args:
        precision: "auto", "bf16" or "float32".
        device: as for `Running`.

    Returns:
        "bf16" or "float32"; "auto" is bf16 where the device has products of it.

    Example:
        >>> resolve_precision("float32", "cpu")
        'float32'
    """
    if precision != "auto":
        return precision
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if device.startswith("cpu"):
        has = torch.cpu.get_capabilities()
        return "bf16" if any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "float32"
    return "float32"
