"""Whether a calibration fits a swap: the rule, and the model, told from others by its sizes and a few weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selectivit.ops.selective import AttentionRule
from selectivit.swap.sites import Site, unwrap

SAMPLES = 16  # values kept of each projection, for models whose weights were cast to another dtype


def fingerprint(model: nn.Module, sites: Sequence[Site]) -> dict[str, Any]:
    """Sizes and a hash of the first and the last layer's output projection; a swap changes none of it.

    Args:
        model: the model that holds the sites.
        sites: all of its attention layers, in block order.

    Returns:
        What JSON can hold: model, layers, heads, width, dtype, sha256, sample.
    """
    weights = [w for w in map(_weight, (sites[0], sites[-1])) if w is not None]
    digest, sample = hashlib.sha256(), []
    for weight in weights:
        flat = weight.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
        places = torch.linspace(0, len(flat) - 1, SAMPLES, dtype=torch.float64).round().long()
        sample += flat[places].double().tolist()
    return {
        "model": type(unwrap(model)).__name__,
        "layers": len(sites),
        "heads": [site.num_heads for site in sites],
        "width": weights[0].shape[0] if weights else None,
        "dtype": str(weights[0].dtype) if weights else None,
        "sha256": digest.hexdigest(),
        "sample": sample,
    }


def same_weights(fitted: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether two fingerprints are of the same weights, be they cast to another dtype in between."""
    if fitted["layers"] != here["layers"] or fitted["heads"] != here["heads"]:
        return False
    if fitted["dtype"] is None or here["dtype"] is None:  # projections without plain weights, such as quantized ones
        return True
    if fitted["dtype"] == here["dtype"]:
        return fitted["sha256"] == here["sha256"]
    one, other = (torch.tensor(each["sample"], dtype=torch.float64) for each in (fitted, here))
    return one.shape == other.shape and torch.allclose(one, other, rtol=2**-7, atol=1e-7)  # bfloat16 keeps 8 bits


def describe(found: Mapping[str, Any]) -> str:
    """A fingerprint in words."""
    size = f"{found['layers']} attention layers, width {found['width']}, {str(found['dtype']).removeprefix('torch.')}"
    return f"{found['model']} ({size}, projection weights {found['sha256'][:12]})"


def check_fits(scale: Any, rule: AttentionRule, model: nn.Module, found: Sequence[Site]) -> None:
    """Refuse a calibration that was fitted for another rule or another model.

    Args:
        scale: the calibration; what it leaves open (`alpha`, `scores`, `fitted_for`) is not checked.
        rule: what the swap puts in.
        model: where the swap puts it.
        found: all attention layers of the model, in block order.

    Raises:
        ValueError: it does not fit; the text says what it was fitted for, and what came.
    """
    if not hasattr(scale, "factors"):
        raise ValueError(f"scale must be a number, a tensor (heads,) or a calibration, got {type(scale).__name__}")
    fitted_alpha, fitted_scores = getattr(scale, "alpha", None), getattr(scale, "scores", None)
    if fitted_alpha is not None:
        alpha = {"entmax": rule.alpha, "sparsemax": 2.0}.get(rule.normalizer)
        asked = rule.normalizer if rule.normalizer != "entmax" else f"alpha={alpha!r}"
        if isinstance(alpha, Tensor):
            alpha = fitted_alpha if bool((alpha == fitted_alpha).all()) else None
        if alpha != fitted_alpha:
            raise ValueError(
                f"the calibration was fitted for alpha={fitted_alpha!r} of entmax (2 is sparsemax), the swap asks for "
                f"{asked}: calibrate for what you swap in"
            )
    if fitted_scores is not None and fitted_scores != rule.scores:
        raise ValueError(f"the calibration was fitted for scores={fitted_scores!r}, the swap asks for {rule.scores!r}")
    fitted_for = getattr(scale, "fitted_for", None)
    if fitted_for is not None:
        here = fingerprint(model, found)
        if not same_weights(fitted_for, here):
            raise ValueError(
                f"the calibration was fitted for {describe(fitted_for)}, this model is {describe(here)}: calibrate it "
                "with its own weights"
            )


def _weight(site: Site) -> Tensor | None:
    weight = getattr(site.projection, "weight", None)
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter) or weight.is_meta:
        return None
    return weight
