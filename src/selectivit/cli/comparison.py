"""One photo through one model twice, with softmax and with a swap, and what each of the two shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selectivit.cli.options import SwapOptions, parse_layers
from selectivit.cli.swapping import fitted_alpha, load_calibration, swapped
from selectivit.features import Features, features
from selectivit.ops.selective import attention_weights
from selectivit.swap.attend import Call
from selectivit.swap.calibrate import SupportOutOfReachError, calibrate_swap
from selectivit.swap.calibration import Calibration
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites
from selectivit.swap.swap import nothing_found
from selectivit.vis.attention import patch_weights
from selectivit.vis.statistics import AttentionStatistics, attention_statistics

USUAL_SUPPORT = 0.25


@dataclass(frozen=True)
class View:
    """What one pass of a photo through a model shows.

    Args:
        found: the features of the chosen layer, of a batch of one.
        call: what the attention of that layer saw.
        statistics: one entry an attention layer, by the module's name.
    """

    found: Features
    call: Call
    statistics: Mapping[str, AttentionStatistics]

    def cls_attention(self) -> Tensor:
        """Average over heads what the CLS token attends to; over all tokens too, where there is no CLS token.

        Returns:
            Weights of the patches, (h, w).
        """
        return self._attention(torch.arange(1 if self.found.cls is not None else self.call.q.shape[2]))

    def patch_attention(self, patch: tuple[int, int]) -> Tensor:
        """Average over heads what one patch attends to.

        Args:
            patch: its row and column.

        Returns:
            Weights of the patches, (h, w).

        Raises:
            ValueError: there is no such patch.
        """
        h, w = self.found.grid
        if not (0 <= patch[0] < h and 0 <= patch[1] < w):
            raise ValueError(f"expected a patch within {h} rows and {w} columns, counted from 0, got {patch}")
        num_prefix = self.call.q.shape[2] - h * w
        return self._attention(torch.tensor([num_prefix + patch[0] * w + patch[1]]))

    def _attention(self, queries: Tensor) -> Tensor:
        call = self.call
        total = torch.zeros(call.k.shape[2], dtype=torch.float64)
        for rows in queries.to(call.q.device).split(256):  # all at once would be N x N
            weights = attention_weights(
                call.q, call.k, call.v, call.rule, scale=call.scale, attn_mask=call.attn_mask, queries=rows
            )  # (1, H, n, M)
            total += weights[0].mean(0).sum(0).double().cpu()
        return patch_weights((total / len(queries)).float(), self.found.grid)


@dataclass(frozen=True)
class Comparison:
    """Softmax and a swap on one photo.

    Args:
        softmax: the model as it came.
        swap: the model with the swap.
        patch: row and column of the query patch.
        replaced: the attention modules that the swap replaced.
        skipped: those it did not, and why.
        calibration: factors on the swap's scores; None without.
        notes: what was done otherwise than asked.
    """

    softmax: View
    swap: View
    patch: tuple[int, int]
    replaced: Sequence[str]
    skipped: Mapping[str, str]
    calibration: Calibration | None
    notes: Sequence[str] = ()


def compare_photo(
    model: nn.Module,
    images: Tensor,
    swap: SwapOptions,
    *,
    seed: int = 0,
    layer: int = -1,
    patch: tuple[int, int] | None = None,
    calibrate: bool = True,
    max_support: float | None = None,
) -> Comparison:
    """Look at a photo with softmax and with a swap.

    Args:
        model: the model, with softmax; left as it came.
        images: (1, 3, H, W), normalised.
        swap: what takes softmax's place.
        seed: of the random mask.
        layer: whose tokens and attention to keep, counted from 0; negative from the end.
        patch: row and column of the query patch; None is `salient_patch` of softmax's CLS attention.
        calibrate: fit factors on this photo, unless the swap names a calibration or there is nothing to fit.
        max_support: the share of non-zero weights that the calibration may leave, 0..1; None is `USUAL_SUPPORT`, or
            the least that can be reached, where that is more.

    Returns:
        Both views.

    Raises:
        ValueError: a rule that does not exist, a layer or patch out of range, a model without attention.
    """
    calibration, notes = load_calibration(swap), ()
    with swapped(model, swap, seed, calibration):
        pass  # a rule or layer that does not exist shows now, not after the slow part
    softmax = look(model, images, layer)
    patch = patch or salient_patch(softmax.cls_attention())
    softmax.patch_attention(patch)  # a patch out of range, too
    alpha = fitted_alpha(swap)
    if calibration is None and calibrate and alpha is not None:
        calibration, notes = _fit(model, images, swap, alpha, max_support)
    with swapped(model, swap, seed, calibration) as made:
        other = look(model, images, layer)
    return Comparison(softmax, other, patch, made.replaced, made.skipped, calibration, notes)


def _fit(
    model: nn.Module, images: Tensor, swap: SwapOptions, alpha: float, max_support: float | None
) -> tuple[Calibration, tuple[str, ...]]:
    """Calibrate; a bound that nobody asked for gives way where no factor meets it, and a note says so."""
    more: dict[str, Any] = {"scores": swap.scores, "layers": parse_layers(swap.layers)}
    try:
        bound = USUAL_SUPPORT if max_support is None else max_support
        return calibrate_swap(model, images, alpha, bound, **more), ()
    except SupportOutOfReachError as error:
        if max_support is not None:
            raise
        least = error.least
    calibration = calibrate_swap(model, images, alpha, min(1.0, 1.001 * least), **more)
    reached = calibration.mean_support()
    return calibration, (
        f"no factor brings the mean share of non-zero weights down to {USUAL_SUPPORT} on so few tokens: the factors "
        f"leave the least, {reached:.3g}; a larger --size has more tokens",
    )


def look(model: nn.Module, images: Tensor, layer: int) -> View:
    """Pass a photo through a model as it is now, swapped or not.

    Args:
        model: the model.
        images: (1, 3, H, W), normalised.
        layer: whose tokens and attention to keep, counted from 0; negative from the end.

    Returns:
        What was seen.

    Raises:
        ValueError: the layer is out of range, or the model has no attention that is known.
    """
    sites, skipped = find_sites(model)
    if not sites:
        raise ValueError(nothing_found(model, skipped))
    if not -len(sites) <= layer < len(sites):
        last = len(sites) - 1
        raise ValueError(f"expected a layer from 0 to {last}, or -1 to {-len(sites)} from the end, got {layer}")
    with torch.inference_mode():
        with recording(sites) as calls:
            found = features(model, images)
        if layer % len(sites) != len(sites) - 1:
            found = features(model, images, layer=layer)
        # A layer at a time, and its queries in parts: the N x N weights of all layers would not fit.
        statistics = {name: _statistics(made[0]) for name, made in calls.items() if made}
    return View(found, calls[sites[layer].name][0], statistics)


def salient_patch(weights: Tensor) -> tuple[int, int]:
    """Choose a patch to look from: the one with the most attention, its eight neighbours counted as well.

    Args:
        weights: attention, (h, w).

    Returns:
        Row and column; the first in reading order, if several are equal.

    Example:
        >>> weights = torch.zeros(5, 5)
        >>> weights[2, 3] = 1.0
        >>> salient_patch(weights)
        (2, 3)
    """
    # A single patch may be an artefact that attention is parked on; one among attended neighbours is an object.
    around = 9 * nn.functional.avg_pool2d(weights[None, None].double(), 3, stride=1, padding=1)[0, 0]
    place = int((around + weights).flatten().argmax())
    return place // weights.shape[1], place % weights.shape[1]


def _statistics(call: Call) -> AttentionStatistics:
    return attention_statistics(call.q, call.k, call.v, call.rule, scale=call.scale, attn_mask=call.attn_mask)
