"""How far a depth map is from the measured one: RMSE, AbsRel and δ, inside the crops of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CROPS: dict[str, tuple[float, float, float, float]] = {
    "none": (0.0, 1.0, 0.0, 1.0),
    "eigen": (45 / 480, 471 / 480, 41 / 640, 601 / 640),
    "kitti-eigen": (0.3324324, 0.91351351, 0.0359477, 0.96405229),
    "garg": (0.40810811, 0.99189189, 0.03594771, 0.96405229),
}
"""Name -> top, bottom, left and right as shares of height and width. "eigen" is NYUv2's, [45:471, 41:601] of 480x640;
"kitti-eigen" and "garg" are KITTI's."""

METRICS = ("rmse", "abs_rel", "delta1", "delta2", "delta3")


def scored_pixels(depth: Tensor, crop: str) -> Tensor:
    """Which pixels are scored.

    Args:
        depth: (H, W), measured, 0 where there is none.
        crop: a name of `CROPS`.

    Returns:
        (H, W), bool.

    Raises:
        ValueError: another crop.

    Example:
        >>> int(scored_pixels(torch.ones(480, 640), "eigen").sum()) == (471 - 45) * (601 - 41)
        True
    """
    if crop not in CROPS:
        raise ValueError(f"expected --crop {', '.join(CROPS)}, got {crop!r}")
    height, width = depth.shape
    top, bottom, left, right = CROPS[crop]
    inside = torch.zeros_like(depth, dtype=torch.bool)
    inside[
        int(top * height + 1e-6) : int(bottom * height + 1e-6), int(left * width + 1e-6) : int(right * width + 1e-6)
    ] = True
    return inside & (depth > 0)


def depth_metrics(predicted: Tensor, depth: Tensor, crop: str = "none") -> dict[str, float] | None:
    """Score one photo.

    Args:
        predicted: (H, W), metres.
        depth: (H, W), metres, 0 where there is none.
        crop: a name of `CROPS`.

    Returns:
        "rmse" in metres, "abs_rel", and "delta1" … "delta3": the share of pixels whose ratio to the measured depth is
        below 1.25, 1.25², 1.25³. None where no pixel is scored.

    Raises:
        ValueError: another crop.

    Example:
        >>> depth_metrics(torch.full((2, 2), 2.0), torch.full((2, 2), 1.0))["rmse"]
        1.0
    """
    from torchmetrics.functional import mean_absolute_percentage_error, mean_squared_error

    pixels = scored_pixels(depth, crop)
    if not bool(pixels.any()):
        return None
    found, target = predicted[pixels].double(), depth[pixels].double()
    ratio = torch.maximum(found / target, target / found)
    return {
        "rmse": mean_squared_error(found, target, squared=False).item(),
        "abs_rel": mean_absolute_percentage_error(found, target).item(),
        **{f"delta{n}": (ratio < 1.25**n).double().mean().item() for n in (1, 2, 3)},
    }


def mean_metrics(photos: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over photos, as the depth benchmarks have it.

    Args:
        photos: of each what `depth_metrics` gives.

    Returns:
        The same names.

    Raises:
        ValueError: no photos.
    """
    if not photos:
        raise ValueError(
            "no photo has a pixel with depth inside the crop: check --crop, --units and the range of depth"
        )
    return {name: sum(photo[name] for photo in photos) / len(photos) for name in METRICS}
