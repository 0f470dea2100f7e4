"""Tensors as the kernels read them by pointers and strides: (B, H, …), with signs that stand in memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def four_dims(t: Tensor) -> Tensor:
    """(B, H, …): further leading dims folded into B, missing ones added."""
    t = t.resolve_neg()  # such a view's memory holds the other sign
    while t.ndim < 4:
        t = t.unsqueeze(0)
    return t if t.ndim == 4 else t.flatten(0, -4)


def folded_mask(mask: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Four dims; `convert` sees one of what is broadcast, which stays broadcast through it and through the fold."""
    shape, head = mask.shape, max(0, mask.ndim - 3)
    small = convert(mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())])
    folded = four_dims(small.expand(*shape[:head], *small.shape[head:]))  # the dims that are folded into one alone
    return folded.expand(folded.shape[0], *(1,) * (3 - len(shape[head:])), *shape[head:])
