"""Softmax and a swap on one photo: both feature maps in the same colours, and where one patch attends."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selectivit.demo.memory import Memory
from selectivit.demo.photo import Photo, ready
from selectivit.demo.shelf import Shelf
from selectivit.features import features
from selectivit.ops.selective import attention_weights
from selectivit.swap.attend import Call
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites
from selectivit.swap.swap import Swap, nothing_found, swap_attention
from selectivit.vis.attention import patch_weights, weight_scale
from selectivit.vis.pca import pca_maps
from selectivit.vis.pixels import attention_pixels, picture_png
from selectivit.vis.statistics import mean_cosine


@dataclass(frozen=True)
class Attend:
    """The attention that takes softmax's place.

    Args:
        normalizer: "entmax", "sparsemax", "softmax" or "random_mask".
        alpha: of entmax, and of the entmax whose support the random mask copies.
        scores: what is compared, such as "qk".
        last: how many of the last layers; more than there are is all.
    """

    normalizer: str = "entmax"
    alpha: float = 1.5
    scores: str = "qk"
    last: int = 4

    @property
    def title(self) -> str:
        """A few words."""
        alpha = f" {self.alpha:g}" if self.normalizer == "entmax" else ""
        scores = f" of {self.scores}" if self.scores != "qk" else ""
        return f"{self.normalizer.replace('_', ' ')}{alpha}{scores}"


@dataclass(frozen=True)
class Pass:
    """One pass of a photo through a model.

    Args:
        map: features of the patches after the final norm, (C, h, w).
        call: what the last attention layer saw.
        shown: the photo as the model saw it, (H, W, 3) in 0..1.
        replaced: how many layers a swap changed.
    """

    map: Tensor
    call: Call
    shown: Tensor
    replaced: int


@dataclass(frozen=True)
class FeatureMaps:
    """Both feature maps in joint PCA colours.

    Args:
        pictures: softmax and the swap, (h, w, 3) PNGs, a pixel a patch.
        grid: rows and columns of patches.
        shape: height and width of the photo as the model saw it, pixels.
        explained: share of the variance that the three colours hold, 0..1.
        cosine: mean cosine of the two maps' patches.
        replaced: how many layers the swap changed.
    """

    pictures: tuple[bytes, bytes]
    grid: tuple[int, int]
    shape: tuple[int, int]
    explained: float
    cosine: float
    replaced: int


@dataclass(frozen=True)
class Looked:
    """Where one patch looks, in the last layer, mean over heads.

    Args:
        picture: the heat map over the pale photo, PNG; grey where every head has exactly 0.
        support: keys with a weight that is not 0, mean over heads.
        fewest: of the head with the fewest.
        most: of the head with the most.
        keys: how many there are, class token and registers included.
        dark: share of the patches whose weight is exactly 0 in every head.
        largest: the largest weight of a patch, mean over heads.
    """

    picture: bytes
    support: float
    fewest: int
    most: int
    keys: int
    dark: float
    largest: float


def look(shelf: Shelf, memory: Memory, photo: Photo, name: str, size: int, attend: Attend | None) -> Pass:
    """Pass a photo through a model, with a swap or without.

    Args:
        shelf: of models.
        memory: of results.
        photo: the photo.
        name: of the model.
        size: of the shorter side, pixels.
        attend: the swap; None is the model as it comes.

    Returns:
        What was seen, on the CPU.

    Raises:
        ValueError: a model whose attention cannot be swapped, or a rule that does not exist.
        WeightsError: weights that cannot be had.
    """

    def compute() -> Pass:
        with shelf.model(name) as model:
            given = ready(photo, model, size)
            sites, skipped = find_sites(model)
            if not sites:
                raise ValueError(nothing_found(model, skipped))
            with swapped(model, attend, len(sites)) as swap, torch.inference_mode():
                with recording(sites[-1:]) as calls:
                    found = features(model, given.pixels)
            return Pass(
                found.map[0].float().cpu(),
                calls[sites[-1].name][0],
                given.shown,
                len(swap.replaced) if isinstance(swap, Swap) else 0,
            )

    return memory.get(("look", photo.digest, shelf.check(name), size, attend), compute)


def swapped(model: nn.Module, attend: Attend | None, layers: int) -> Swap | nullcontext[None]:
    """Swap as it was asked for.

    Args:
        model: changed while the context lasts.
        attend: the swap; None leaves the model alone.
        layers: how many attention layers the model has.

    Returns:
        A context.
    """
    if attend is None:
        return nullcontext()
    alpha = 2.0 if attend.normalizer == "sparsemax" else attend.alpha
    return swap_attention(model, attend.normalizer, alpha, attend.scores, -min(max(1, attend.last), layers))


def feature_maps(shelf: Shelf, memory: Memory, photo: Photo, name: str, size: int, attend: Attend) -> FeatureMaps:
    """Colour the features of softmax and of a swap by one PCA: equal colours are equal features.

    Args:
        shelf: of models.
        memory: of results.
        photo: the photo.
        name: of the model.
        size: of the shorter side, pixels.
        attend: the swap.

    Returns:
        Both maps.

    Raises:
        ValueError: as `look`.
        WeightsError: as `look`.
    """
    plain = look(shelf, memory, photo, name, size, None)
    other = look(shelf, memory, photo, name, size, attend)
    (first, second), explained = pca_maps([plain.map, other.map])
    return FeatureMaps(
        (picture_png(first), picture_png(second)),
        (plain.map.shape[1], plain.map.shape[2]),
        (plain.shown.shape[0], plain.shown.shape[1]),
        explained.sum().item(),
        mean_cosine([plain.map, other.map])[0],
        other.replaced,
    )


def patch_attention(passes: tuple[Pass, ...], patch: tuple[int, int]) -> tuple[Looked, ...]:
    """Show where one patch attends in several passes, on one colour scale.

    Args:
        passes: of the same photo through the same model.
        patch: its row and column.

    Returns:
        One entry a pass.

    Raises:
        ValueError: there is no such patch.
    """
    grid = (passes[0].map.shape[1], passes[0].map.shape[2])
    if not (0 <= patch[0] < grid[0] and 0 <= patch[1] < grid[1]):
        raise ValueError(f"expected a patch within {grid[0]} rows and {grid[1]} columns, counted from 0, got {patch}")
    rows = [_row(each.call, grid, patch) for each in passes]  # each (H, M)
    maps = [patch_weights(row.mean(0), grid) for row in rows]
    norm = weight_scale(*maps)
    found = []
    for each, row, weights in zip(passes, rows, maps, strict=True):
        support = row.count_nonzero(-1)
        found.append(
            Looked(
                picture_png(attention_pixels(each.shown, weights, norm)),
                support.double().mean().item(),
                int(support.min()),
                int(support.max()),
                row.shape[1],
                (weights == 0).double().mean().item(),
                weights.max().item(),
            )
        )
    return tuple(found)


def _row(call: Call, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """The weights that one patch gives to all keys, (H, M)."""
    num_prefix = call.q.shape[2] - grid[0] * grid[1]
    query = torch.tensor([num_prefix + patch[0] * grid[1] + patch[1]], device=call.q.device)
    with torch.inference_mode():
        weights = attention_weights(
            call.q, call.k, call.v, call.rule, scale=call.scale, attn_mask=call.attn_mask, queries=query
        )
    return weights[0, :, 0].float().cpu()
