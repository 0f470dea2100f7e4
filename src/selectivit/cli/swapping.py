"""From the options of a swap to the swap, and to the calibration it is scaled by."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from selectivit.cli.options import SwapOptions, parse_layers

if TYPE_CHECKING:
    from torch import nn

    from selectivit.swap.calibration import Calibration


def swaps(swap: SwapOptions) -> bool:
    """Tell whether the options ask for anything but the model's own softmax.

    Args:
        swap: the options.

    Returns:
        True if so.

    Example:
        >>> swaps(SwapOptions(normalizer="softmax")), swaps(SwapOptions())
        (False, True)
    """
    return (swap.normalizer, swap.scores, swap.calibration) != ("softmax", "qk", None)


def swapped(
    model: nn.Module, swap: SwapOptions, seed: int, calibration: Calibration | None = None
) -> AbstractContextManager[Any]:
    """Swap as the options say.

    Args:
        model: changed while the context lasts.
        swap: the options.
        seed: of the random mask.
        calibration: factors on the scores.

    Returns:
        A context manager; it yields the swap.

    Raises:
        ValueError: a rule that does not exist, a layer out of range, a model without attention, a calibration that
            was fitted for another swap.
    """
    from selectivit.swap.swap import swap_attention

    alpha = 2.0 if swap.normalizer == "sparsemax" else swap.alpha
    layers = parse_layers(swap.layers)
    return swap_attention(model, swap.normalizer, alpha, swap.scores, layers, scale=calibration, seed=seed)


def fitted_alpha(swap: SwapOptions) -> float | None:
    """Give the alpha that a calibration for this swap is fitted with.

    Args:
        swap: the options.

    Returns:
        The alpha; None if there is nothing to fit: softmax, the random mask, values without mixing.

    Example:
        >>> fitted_alpha(SwapOptions("sparsemax")), fitted_alpha(SwapOptions("softmax"))
        (2.0, None)
    """
    alpha = {"entmax": swap.alpha, "sparsemax": 2.0}.get(swap.normalizer, 1.0)
    return None if alpha == 1 or swap.scores == "v" else alpha


def load_calibration(swap: SwapOptions) -> Calibration | None:
    """Read the calibration that the options name.

    Args:
        swap: the options.

    Returns:
        The calibration; None if they name none.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: the folder does not hold one.
    """
    if swap.calibration is None:
        return None
    from selectivit.swap.calibration import Calibration

    return Calibration.load(swap.calibration)
