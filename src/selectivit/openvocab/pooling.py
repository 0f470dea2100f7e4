"""The mean of a map over boxes: RoIAlign with one bin, tested against torchvision's."""

from __future__ import annotations

import torch
from torch import Tensor


def pooled(values: Tensor, boxes: Tensor) -> Tensor:
    """The mean of a map over boxes, sampled between its cells: RoIAlign with one bin, aligned.

    Args:
        values: (E, h, w).
        boxes: (R, 4), left, top, width and height in cells; cell i reaches from i to i + 1.

    Returns:
        (R, E), float32.

    Example:
        >>> pooled(torch.arange(4.0).reshape(1, 2, 2), torch.tensor([[0.0, 0.0, 2.0, 2.0]]))
        tensor([[1.5000]])

    Source: Mask R-CNN, arXiv 1703.06870.
    """
    boxes = boxes.float()
    across = torch.stack([_weights(values.shape[2], left, wide) for left, _, wide, _ in boxes])  # (R, w)
    down = torch.stack([_weights(values.shape[1], top, tall) for _, top, _, tall in boxes])  # (R, h)
    return torch.einsum("rh,ehw,rw->re", down, values.float(), across)


def _weights(cells: int, start: Tensor, length: Tensor) -> Tensor:
    """How much each cell of a row counts for a stretch of it: one sample for each begun cell, spread evenly."""
    samples = max(1, int(torch.ceil(length)))
    place = start + (torch.arange(samples, device=start.device) + 0.5) * (length / samples) - 0.5
    place = place.clamp(0, cells - 1)
    centres = torch.arange(cells, device=start.device)
    return (1 - (place[:, None] - centres).abs()).clamp_min(0).mean(0)
