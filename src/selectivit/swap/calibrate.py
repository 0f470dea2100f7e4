"""Fit the scale of the scores, so that a sparse layer keeps softmax's outputs without training.

At softmax's own scale entmax is far sharper than softmax: near a weight p its log-slope is p^(1−α) times softmax's, so
untrained layers lose much of what they knew. One factor per layer and head, fitted on a few images, gives most of it
back. Errors are weighed by the layer's output projection, as the rest of the model sees them, over the variance of the
layer's output. How much support each head may keep is shared out as in rate-distortion: one price per unit of support
for all heads, raised until their mean support meets the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from selectivit.ops.selective import SOFTMAX, AttentionRule, attention_weights
from selectivit.swap.attend import Call
from selectivit.swap.calibration import Calibration
from selectivit.swap.fingerprint import fingerprint
from selectivit.swap.maps import run_forward
from selectivit.swap.record import recording
from selectivit.swap.sites import Site, find_sites, find_tower, unwrap
from selectivit.swap.swap import nothing_found, select_layers
from selectivit.swap.tap import eager

FACTORS = tuple(1.4 * 0.02 ** (i / 23) for i in range(24))  # 1.4 … 0.028: a diffuse head needs about 1/√N
ROWS_PER_IMAGE = 256


class SupportOutOfReachError(ValueError):
    """No factor of the grid meets the bound on the mean support; `least` is the smallest there is."""

    def __init__(self, least: float, text: str):
        super().__init__(text)
        self.least = least


def calibrate_swap(
    model: nn.Module,
    images: Tensor | Sequence[Tensor],
    alpha: float = 1.5,
    max_support: float | None = None,
    *,
    scores: str = "qk",
    layers: int | Sequence[int] | None = None,
) -> Calibration:
    """Fit one factor per layer and head, so that α-entmax keeps the outputs that softmax gives.

    No labels and no gradients: every image passes the untouched model once, and at each attention layer entmax's
    outputs are compared with softmax's over a grid of factors.

    Args:
        model: a model of any host that `swap_attention` knows, not swapped; it is left as it was.
        images: (B, 3, H, W) normalised as the model expects, or a list of such, or of (3, H, W), of any sizes. Four
            photos do.
        alpha: entmax's α > 1.
        max_support: bound on the mean share of keys with non-zero weight, in (0, 1]; heads share it out among
            themselves where it costs least. None asks for the closest outputs.
        scores: the score source; softmax and entmax are compared on the same one.
        layers: as in `swap_attention`; None is all.

    Returns:
        The calibration, to pass as `swap_attention(model, alpha=alpha, layers=layers, scale=calibration)`.

    Raises:
        ValueError: no images, a swapped model, alpha ≤ 1, or a bound that no factor of the grid meets.

    Example:
        >>> from torch import nn
        >>> model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> calibration = calibrate_swap(model, torch.randn(1, 30, 16), max_support=0.5)
        >>> calibration.factors["self_attn"].shape, calibration.mean_support() <= 0.5
        (torch.Size([2]), True)
    """
    rule = AttentionRule("entmax", alpha=alpha, scores=scores)
    if alpha == 1 or scores == "v":
        raise ValueError("alpha=1 is softmax and scores='v' mixes nothing: there is no factor to fit")
    if max_support is not None and not 0 < max_support <= 1:
        raise ValueError(f"max_support is a share of the keys in (0, 1], got {max_support}")
    singles = _one_by_one(model, images)
    found, skipped = find_sites(model)
    if not found:
        raise ValueError(nothing_found(model, skipped))
    sites = select_layers(found, layers)
    curves = {site.name: _Curve(site) for site in sites}
    for image in singles:
        for name, call in _calls(model, image, sites).items():
            curves[name].add(call, rule)
    chosen, price = _share_out(curves, max_support)
    fitted_on = {
        "model": type(unwrap(model)).__name__,
        "images": len(singles),
        "sizes": sorted({tuple(image.shape[-2:]) for image in singles}),
        "max_support": max_support,
        "price_of_support": price,
    }
    parts = {what: {name: chosen[name][what] for name in curves} for what in ("factors", "support", "error")}
    fitted_for = fingerprint(model, found)
    return Calibration(**parts, alpha=float(alpha), scores=scores, fitted_on=fitted_on, fitted_for=fitted_for)


def measure_swap(
    model: nn.Module, images: Tensor | Sequence[Tensor], factors: Mapping[str, Tensor], alpha: float, scores: str
) -> Calibration:
    """Put factors that were found otherwise, by training for one, into a calibration for the model as it is now.

    Args:
        model: swapped, with these factors in force.
        images: as for `calibrate_swap`; support and error are measured on them.
        factors: by attention module's name, (heads,).
        alpha: entmax's α.
        scores: the score source.

    Returns:
        The calibration: support and distance to softmax's outputs are those of the swapped model's own activations.

    Raises:
        ValueError: no images, or a name that is no attention module of the model.

    Example:
        >>> from selectivit.swap.swap import swap_attention
        >>> model, factors = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval(), torch.tensor([0.5, 0.7])
        >>> with swap_attention(model, scale=factors):
        ...     found = measure_swap(model, torch.randn(1, 30, 16), {"self_attn": factors}, 1.5, "qk")
        >>> found.factors["self_attn"]
        tensor([0.5000, 0.7000])
    """
    singles, (found, _) = _one_by_one(model, images), find_sites(model)
    sites = [site for site in found if site.name in factors]
    if len(sites) != len(factors):
        known = ", ".join(site.name for site in found)
        raise ValueError(f"expected factors of attention modules of the model ({known}), got {', '.join(factors)}")
    rule = AttentionRule("entmax", alpha=alpha, scores=scores)
    curves = {site.name: _Curve(site, [factors[site.name]]) for site in sites}
    for image in singles:
        for name, call in _calls(model, image, sites, swapped=True).items():
            curves[name].add(call, rule)
    measured = {name: [part[:, 0].float() for part in curve.relative()] for name, curve in curves.items()}
    return Calibration(
        factors={name: factor.detach().float().cpu().clone() for name, factor in factors.items()},
        support={name: support for name, (_, support) in measured.items()},
        error={name: error for name, (error, _) in measured.items()},
        alpha=float(alpha),
        scores=scores,
        fitted_on={"model": type(unwrap(model)).__name__, "images": len(singles)},
        fitted_for=fingerprint(model, found),
    )


def _one_by_one(model: nn.Module, images: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Batches of one, so that images of any sizes share a fit and memory holds one image's queries, keys and values."""
    batches = [images] if isinstance(images, Tensor) else list(images)
    if find_tower(model) is not None:  # other models take tokens, where three dims are a batch already
        batches = [batch[None] if batch.ndim == 3 else batch for batch in batches]
    singles = [batch[i : i + 1] for batch in batches for i in range(len(batch))]
    if any(batch.is_floating_point() and not bool(batch.isfinite().all()) for batch in singles):
        raise ValueError("calibrate_swap got images with NaN or infinite values; check how they were normalised")
    if not singles:
        raise ValueError("calibrate_swap needs at least one image, got none")
    return singles


@torch.no_grad()
def _calls(model: nn.Module, image: Tensor, sites: Sequence[Site], swapped: bool = False) -> dict[str, Call]:
    """What every site sees when the model, untouched unless `swapped`, looks at one image."""
    with recording(sites) as calls, eager():
        run_forward(unwrap(model), image, sites[-1])
    found = {}
    for site in sites:
        if len(calls[site.name]) != 1:
            raise ValueError(f"expected {site.name!r} to attend once a forward, it did {len(calls[site.name])} times")
        call = calls[site.name][0]
        if not swapped and site.native.normalizer != "softmax":
            raise ValueError(
                f"{site.name!r} was made with {site.native.normalizer}: there is no softmax to calibrate to"
            )
        if not swapped and (call.rule.normalizer != "softmax" or call.rule.scale is not None):
            raise ValueError(
                f"{site.name!r} is swapped already: restore the swap (restore_attention(model) takes away all), and "
                "calibrate against softmax"
            )
        found[site.name] = call
    return found


class _Curve:
    """One layer's error and support over the grid of factors, summed over images: (heads, factors)."""

    def __init__(self, site: Site, factors: Sequence[float | Tensor] = FACTORS):
        self.factors = factors
        self.squared_error = torch.zeros(site.num_heads, len(factors), dtype=torch.float64)
        self.support = torch.zeros_like(self.squared_error)
        self.variance = torch.zeros(site.num_heads, dtype=torch.float64)
        self.images = 0
        self.metric = _projection_metric(site)

    @torch.no_grad()
    def add(self, call: Call, rule: AttentionRule) -> None:
        n = call.q.shape[-2]
        rows = torch.linspace(0, n - 1, min(n, ROWS_PER_IMAGE), device=call.q.device).round().long()
        see = {"scale": call.scale, "attn_mask": call.attn_mask, "queries": rows}
        value = call.v.to(torch.promote_types(call.v.dtype, torch.float32))
        softmax = replace(SOFTMAX, scores=rule.scores)
        wanted = attention_weights(call.q, call.k, call.v, softmax, **see) @ value  # (1, H, rows, D)
        self.variance += self._squared(wanted - wanted.mean(-2, keepdim=True))
        for i, factor in enumerate(self.factors):
            weights = attention_weights(call.q, call.k, call.v, replace(rule, scale=factor), **see)
            self.squared_error[:, i] += self._squared(weights @ value - wanted)
            self.support[:, i] += weights.count_nonzero((0, 2, 3)).double().cpu() / weights[:, 0].numel()
        self.images += 1

    def _squared(self, change: Tensor) -> Tensor:
        """Squared length (H,) of a change (1, H, rows, D) of the heads' outputs, behind the layer's projection."""
        seen = change if self.metric is None else change @ self.metric.to(change)
        return (seen * change).sum((0, 2, 3)).double().cpu()

    def relative(self) -> tuple[Tensor, Tensor]:
        """Error over the variance of the layer's output, and the mean share of non-zero weights."""
        return self.squared_error / self.variance.sum().clamp_min(1e-30), self.support / self.images

    def cheapest(self, price: float) -> dict[str, Tensor]:
        """Per head the factor of least distance + price · support, refined by a parabola."""
        error, support = self.relative()
        cost = error.sqrt() + price * support  # the distance itself: its square would starve heads of little energy
        best = cost.argmin(-1, keepdim=True)
        inner = best.clamp(1, len(FACTORS) - 2)
        left, middle, right = (cost.gather(-1, inner + step) for step in (-1, 0, 1))
        bend = left - 2 * middle + right
        shift = torch.where((best == inner) & (bend > 0), (left - right) / (2 * bend.clamp_min(1e-30)), 0.0)
        place = (best + shift.clamp(-0.5, 0.5)).squeeze(-1)
        logs = torch.tensor(FACTORS, dtype=torch.float64).log()
        return {
            "factors": _interpolate(logs.expand_as(cost), place).exp().float(),
            "support": _interpolate(support, place).float(),
            "error": _interpolate(error, place).float(),
        }


def _projection_metric(site: Site) -> Tensor | None:
    """WᵀW of each head's columns of the output projection, (H, D, D); None (all alike), where it is no matrix."""
    weight = getattr(site.projection, "weight", None)
    if not isinstance(site.projection, nn.Linear) or not isinstance(weight, Tensor):
        return None
    heads = weight.detach().float().unflatten(1, (site.num_heads, -1)).movedim(1, 0)  # (H, C, D)
    return heads.mT @ heads


def _interpolate(values: Tensor, place: Tensor) -> Tensor:
    """Values (heads, factors) at fractional places (heads,)."""
    low = place.floor().long().clamp(0, values.shape[-1] - 2).unsqueeze(-1)
    part = place.unsqueeze(-1) - low
    return (values.gather(-1, low) * (1 - part) + values.gather(-1, low + 1) * part).squeeze(-1)


def _share_out(curves: Mapping[str, _Curve], max_support: float | None) -> tuple[dict[str, dict[str, Tensor]], float]:
    """The heads' choices at the least price of support at which their mean support meets the bound."""

    def at(price: float) -> tuple[dict[str, dict[str, Tensor]], float]:
        chosen = {name: curve.cheapest(price) for name, curve in curves.items()}
        return chosen, torch.cat([part["support"] for part in chosen.values()]).mean().item()

    chosen, support = at(0.0)
    if max_support is None or support <= max_support:
        return chosen, 0.0
    low, high = 1e-4, 1e6
    chosen, support = at(high)
    if support > max_support:
        raise SupportOutOfReachError(
            support,
            f"no factor up to {FACTORS[0]} brings the mean support to {max_support:.3g}; the least is {support:.3g}: "
            "raise max_support or alpha",
        )
    for _ in range(60):
        middle = math.sqrt(low * high)
        found, support = at(middle)
        if support > max_support:
            low = middle
        else:
            chosen, high = found, middle
    return chosen, high
