"""Attention maps of one layer of any host, softmax or swapped."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selectivit.ops.selective import attention_weights
from selectivit.swap.attend import Call
from selectivit.swap.record import recording
from selectivit.swap.sites import Site, as_index, find_sites, find_tower, unwrap
from selectivit.swap.swap import nothing_found
from selectivit.swap.tap import eager


def attention_maps(
    model: nn.Module,
    images: Tensor,
    layer: int = -1,
    *,
    heads: int | Sequence[int] | None = None,
    queries: int | Sequence[int] | slice | None = None,
) -> Tensor:
    """The attention probabilities of one layer: softmax's, or the swapped rule's while a swap is in force.

    The model is left as it is and computes what it would have computed.

    Args:
        model: a model of any host, swapped or not.
        images: (B, 3, H, W) normalised as the model expects, H and W multiples of the patch; for a model without an
            image tower, whatever its forward takes.
        layer: which attention layer, negatives from the end.
        heads: which heads, None all.
        queries: which query rows (token 0 is the class token where there is one), None all.

    Returns:
        (B, heads, queries, N) float32. Rows sum to 1, except for sums of score sources combined by "sum".

    Raises:
        ValueError: when there is no such layer, head or query.
        MemoryError: when the maps would not fit; the text says how to ask for less.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> attention_maps(model, torch.randn(1, 5, 16)).shape
        torch.Size([1, 2, 5, 5])
    """
    site = _pick(model, layer)
    with recording([site]) as calls, eager():
        run_forward(unwrap(model), images, site)
    found = calls[site.name]
    if len(found) != 1:
        raise ValueError(f"expected {site.name!r} to attend once a forward, it did {len(found)} times")
    call = found[0]
    head_index = _indices(heads, call.q.shape[1], "heads")
    query_index = _indices(queries, call.q.shape[2], "queries")
    _check_memory(call, len(head_index), len(query_index))
    return _weights(call, head_index, query_index)


def _pick(model: nn.Module, layer: int) -> Site:
    sites, skipped = find_sites(model)
    if not sites:
        raise ValueError(nothing_found(model, skipped))
    index = as_index(layer)
    if index is None or not -len(sites) <= index < len(sites):
        raise ValueError(
            f"layer={layer!r} is out of range: this model has {len(sites)} attention layers, 0 to {len(sites) - 1}"
        )
    return sites[index]


def run_forward(model: nn.Module, images: Tensor, site: Site) -> None:
    """A forward that reaches the site: through the tower's blocks, at any image size, or the model's own."""
    tower = find_tower(model)
    try:
        blocks = tower.host.blocks(tower.module) if tower else []
    except ValueError:  # a tower of a family whose blocks `features` does not know (hybrids, NaFlex)
        blocks = []
    if tower is None or not blocks:
        model(images)
        return
    prefix = f"{tower.name}." if tower.name else ""
    names = [prefix + name + "." for name, _ in blocks]
    at = next((index for index, name in enumerate(names) if site.name.startswith(name)), len(names) - 1)
    tower.host.tokens(tower.module, images, at, False)


def _indices(chosen: int | Sequence[int] | slice | None, count: int, what: str) -> list[int]:
    if chosen is None:
        return list(range(count))
    if isinstance(chosen, slice):
        return list(range(count))[chosen]
    one = as_index(chosen)
    given = [one] if one is not None else list(chosen) if isinstance(chosen, Iterable) else []
    wanted = [index for index in map(as_index, given) if index is not None and -count <= index < count]
    if len(wanted) != len(given) or not wanted:
        raise ValueError(f"{what}={chosen!r}: expected some of 0 to {count - 1}")
    return [index % count for index in wanted]


def _weights(call: Call, heads: list[int], queries: list[int]) -> Tensor:
    rows = torch.tensor(queries, device=call.q.device)
    at = torch.tensor(heads, device=call.q.device)
    q, k, v, mask, rule = call.q, call.k, call.v, call.attn_mask, call.rule
    everything = heads == list(range(q.shape[1]))
    if rule.normalizer == "random_mask":  # draws its noise for all heads at once: pick from the result
        weights = attention_weights(q, k, v, rule, scale=call.scale, attn_mask=mask, queries=rows)
        return weights[:, at].float()
    if not everything:
        q, k, v = q[:, at], k[:, at], v[:, at]
        mask = mask[:, at] if mask is not None and mask.ndim == 4 and mask.shape[1] > 1 else mask
        rule = replace(rule, alpha=_per_head(rule.alpha, at), scale=_per_head(rule.scale, at))
    return attention_weights(q, k, v, rule, scale=call.scale, attn_mask=mask, queries=rows).float()


def _per_head(value: Any, heads: Tensor) -> Any:
    return value[heads.to(value.device)] if isinstance(value, Tensor) and value.numel() > 1 else value


def _check_memory(call: Call, heads: int, queries: int) -> None:
    """Refuse before the allocator does, in words: scores, mask and probabilities are about three maps at once."""
    batch, _, _, _ = call.q.shape
    keys = call.k.shape[2]
    all_heads = call.q.shape[1] if call.rule.normalizer == "random_mask" else heads
    needed = 3 * 4 * batch * all_heads * queries * keys
    free = available_memory(call.q.device)
    if free is not None and needed > free:
        raise MemoryError(
            f"attention maps of shape ({batch}, {heads}, {queries}, {keys}) need about {needed / 2**30:.1f} GiB while "
            f"{free / 2**30:.1f} GiB are free: ask for fewer heads (heads=[0]), fewer query rows (queries=[0] is the "
            "class token where there is one), one layer at a time, fewer images or a smaller image size"
        )


def available_memory(device: torch.device) -> int | None:
    """Free memory in bytes on `device`, or None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
