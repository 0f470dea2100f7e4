"""A core-periphery model's look at one photo: its features at every budget and size, its cores through the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from selectivit.models.veca import Veca
    from selectivit.vis.core_statistics import CoreStatistics

SHOWN_SIDE, SHOWN_PIXELS = 480, 600_000
"""Shorter side and most pixels of the photo in pictures."""


@dataclass(frozen=True)
class CoreWays:
    """The cores of one budget.

    Args:
        coords: x and y in −1..1, (layers, C, 2).
        winners: for each patch the core that it takes most from, mean over heads, (layers, h, w).
    """

    coords: Tensor
    winners: Tensor


@dataclass(frozen=True)
class CoreLook:
    """What was seen.

    Args:
        shown: the photo for pictures, (H, W, 3) in 0..1.
        maps: (size, budget) -> features after the final norm, (D, h, w).
        size: the size, pixels of the shorter side, at which cores were looked at: the one nearest to the model's own.
        budgets: number of cores -> where they are and who listens, at that size.
        attention: how much each core of the largest budget takes from each patch, mean over heads, (layers, C, h, w).
        statistics: of that attention.
        notes: what was done to the photo on reading it.
    """

    shown: Tensor
    maps: dict[tuple[int, int], Tensor]
    size: int
    budgets: dict[int, CoreWays]
    attention: Tensor
    statistics: CoreStatistics
    notes: tuple[str, ...]


def look_at(model: Veca, path: Path, budgets: Sequence[int], sizes: Sequence[int]) -> CoreLook:
    """Pass a photo through the model at every budget and size.

    Args:
        model: in eval mode.
        path: the photo's file.
        budgets: numbers of cores.
        sizes: of the photo's shorter side, pixels.

    Returns:
        What was seen, on the CPU, float32.

    Raises:
        ImageError: the file is no image that can be read.
        OSError: the file cannot be opened.
        ValueError: budgets outside the bank, sizes that are not positive.
    """
    import torch

    from selectivit.cli.reading import ready_photo
    from selectivit.data.images import read_image
    from selectivit.data.transforms import to_picture
    from selectivit.vis.core_statistics import core_statistics

    own = min(sizes, key=lambda size: (abs(size - model.config.image_size), size))
    maps, ways, notes = {}, {}, []
    attention = torch.empty(0)
    for size in sizes:
        ready = ready_photo(path, model, size)
        notes += [note for note in ready.notes if note not in notes]
        image = ready.image[None].to(next(model.parameters()).device)
        for budget in budgets:
            with torch.inference_mode():
                out = model(image, budget, maps=range(model.config.depth) if size == own else ())
            maps[size, budget] = out.patch_tokens[0].T.unflatten(1, out.grid).float().cpu()
            if size == own:
                listening = torch.stack([m[0].mean(0).argmax(-1) for m in out.patch_maps])  # (layers, N)
                ways[budget] = CoreWays(out.core_coords[:, 0].float().cpu(), listening.cpu().unflatten(1, out.grid))
            if size == own and budget == max(budgets):
                attention = torch.stack([m[0].mean(0) for m in out.core_maps]).float().cpu()  # (layers, C, N)
    features = maps[own, max(budgets)]
    grid = (features.shape[1], features.shape[2])
    found = core_statistics(attention, features.flatten(1).T, grid)
    picture = read_image(path, shorter_side=SHOWN_SIDE).image
    shown = torch.from_numpy(to_picture(picture, patch_size=1, size=SHOWN_SIDE, max_patches=SHOWN_PIXELS)).float() / 255
    return CoreLook(shown, maps, own, ways, attention.unflatten(2, grid), found, tuple(notes))
