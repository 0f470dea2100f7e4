"""What the published methods set otherwise on single data sets, beside their presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from selectivit.openvocab.presets import Preset, find_preset

_SCLIP: Mapping[str, dict[str, Any]] = {
    "voc21": {"logit_scale": 65.0},
    "context60": {"logit_scale": 50.0},
    "coco_object": {"logit_scale": 50.0},
    "coco_stuff": {"size": 448},
    "cityscapes": {"size": 560},
}
PUBLISHED: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "sclip": _SCLIP,
    "clip": _SCLIP,  # in SCLIP's harness, as their presets are
    "maskclip": _SCLIP,
    "clearclip": {"context60": {"threshold": 0.15}},
}
"""Preset -> layout -> changed settings. Source: public configs of SCLIP (arXiv 2312.01597), ClearCLIP (2407.12442)."""


def preset_for(preset: str | Preset, layout: str) -> Preset:
    """A preset as it was published for a data set.

    Args:
        preset: a name, or a preset of your own, which stays as it is.
        layout: of the data set, such as "voc21".

    Returns:
        The preset.

    Raises:
        ValueError: no such preset.

    Example:
        >>> preset_for("sclip", "voc21").logit_scale, preset_for("sclip", "voc20").logit_scale
        (65.0, 40.0)
    """
    if isinstance(preset, Preset):
        return preset
    return replace(find_preset(preset), **PUBLISHED.get(preset, {}).get(layout, {}))
