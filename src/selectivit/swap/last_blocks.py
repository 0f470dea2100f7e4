"""The last blocks of an image tower, run one half at a time with attention of our own; the model is never changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from selectivit.ops.selective import SOFTMAX
from selectivit.swap.install import install
from selectivit.swap.sites import Halves, Tower, find_sites
from selectivit.swap.tap import shadow

Attention = Callable[[Tensor, Tensor, Tensor, float, "Tensor | None"], Tensor]
"""From q, k, v (B, H, N, D), the host's scale and the mask to (B, H, N, D)."""


@dataclass(frozen=True)
class Entry:
    """What a forward brings to one block.

    Args:
        tokens: (B, L, C), prefix tokens first.
        num_prefix: how many tokens come before the patches.
        grid: (h, w) in patches.
        block: the block's place, counted from 0.
        args: what the host passes to the block beside the tokens.
        kwargs: the same by name.
    """

    tokens: Tensor
    num_prefix: int
    grid: tuple[int, int]
    block: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _EnteredError(Exception):
    """Ends a forward before the block that was asked for."""


def enter(tower: Tower, images: Tensor, last: int) -> Entry:
    """Run a tower up to its last blocks.

    Args:
        tower: from `find_tower`.
        images: (B, 3, H, W) normalised, H and W multiples of the patch; any size and aspect.
        last: how many blocks are left.

    Returns:
        What reaches the first of them.

    Raises:
        ValueError: the tower has fewer blocks, or embeds positions anew in each of them.
    """
    blocks = [block for _, block in tower.host.blocks(tower.module)]
    if not 1 <= last <= len(blocks):
        raise ValueError(f"expected 1 to {len(blocks)} of the tower's last blocks, got {last}")
    if last > 1 and getattr(getattr(tower.module, "trunk", tower.module), "rope_mixed", False):
        raise ValueError(
            "this tower has other rotary embeddings in every block: expected its last block alone, layers=1"
        )
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    entered, owner = _EnteredError(), threading.get_ident()

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == owner:
            caught.append((args, kwargs))
            raise entered

    place = len(blocks) - last
    handle = blocks[place].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        tower.host.tokens(tower.module, images, -1, False)
    except _EnteredError as error:
        if error is not entered:
            raise
    finally:
        handle.remove()
    if not caught:
        raise RuntimeError(f"the tower's forward never reached its block {place}")
    args, kwargs = caught[0]
    kwargs = dict(kwargs)
    tokens = args[0] if args else kwargs.pop("hidden_states")
    patch = tower.host.preprocessing(tower.module).patch_size
    height, width = images.shape[-2] // patch, images.shape[-1] // patch
    return Entry(tokens, tokens.shape[1] - height * width, (height, width), place, args[1:], kwargs)


def halves(tower: Tower, entry: Entry, place: int, attention: Attention | None = None) -> Halves:
    """The halves of one of the last blocks, on copies that share its weights.

    Args:
        tower: the tower.
        entry: what `enter` gave.
        place: the block's place, counted from 0.
        attention: in place of the host's softmax; None leaves it.

    Returns:
        The halves.

    Raises:
        ValueError: a block whose attention or halves are not known; the text says why.
    """
    block = _twin(tower.host.blocks(tower.module)[place][1])
    if attention is not None:
        sites, skipped = find_sites(block)
        if len(sites) != 1:
            why = "; ".join(dict.fromkeys(skipped.values())) or f"{len(sites)} attention modules"
            raise ValueError(f"the attention of block {place} cannot be replaced: {why}")
        install(sites[0], SOFTMAX).instead = attention
    return tower.host.halves(block, *entry.args, **entry.kwargs)


def _twin(module: nn.Module) -> nn.Module:
    """A copy of a module and all below it that shares the parameters."""
    twin = shadow(module)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child)
    return twin
