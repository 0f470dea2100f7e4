"""Joint PCA of patch features: one set of colours for several maps."""

from collections.abc import Sequence

import torch
from torch import Tensor

NEUTRAL = 0.5
"""The value of a colour channel that has nothing to show."""


def pca_maps(maps: Sequence[Tensor], *, percentiles: tuple[float, float] = (1.0, 99.0)) -> tuple[list[Tensor], Tensor]:
    """Colour feature maps by their three joint principal components.

    All maps share one centre, one basis and one colour range, so equal colours mean equal features in every map.
    The result is a function of the values alone, without randomness. Each component's sign is the one that makes its
    skewness positive, so that the few stand out bright and the many lie dark; without skewness, the one that makes its
    largest loading positive (the first of them, if several are equal).

    Args:
        maps: feature maps, each (C, h, w) with the same C; h and w may differ.
        percentiles: the two percentiles of a component, over all maps together, that become 0 and 1.

    Returns:
        The colours, each (h, w, 3) float32 in 0..1, and the share of the variance that each of the three components
        explains, (3,) float64. A component without variance (constant features, C < 3) is 0.5 everywhere.

    Raises:
        ValueError: no map, maps of another rank or of different C, or values that are not finite.

    Example:
        >>> maps = [torch.randn(8, 4, 5), torch.randn(8, 2, 2)]
        >>> colours, explained = pca_maps(maps)
        >>> [tuple(c.shape) for c in colours], tuple(explained.shape)
        ([(4, 5, 3), (2, 2, 3)], (3,))
    """
    _check(maps)
    tokens = torch.cat([m.detach().flatten(1).T for m in maps]).double().cpu()  # (N, C), N of all maps
    components, explained = _principal_components(tokens)  # (N, 3), (3,)
    colours = torch.stack([_stretch(column, percentiles) for column in components.T], dim=-1).float()  # (N, 3)
    pieces = colours.split([m.shape[1] * m.shape[2] for m in maps])
    return [piece.reshape(*m.shape[1:], 3) for piece, m in zip(pieces, maps, strict=True)], explained


def _check(maps: Sequence[Tensor]) -> None:
    if not maps:
        raise ValueError("expected at least one feature map (C, h, w), got none")
    for m in maps:
        if m.ndim != 3 or m.numel() == 0:
            raise ValueError(f"expected feature maps (C, h, w) that are not empty, got {tuple(m.shape)}")
        if m.shape[0] != maps[0].shape[0]:
            raise ValueError(
                f"expected the same number of channels in every map, got {maps[0].shape[0]} and {m.shape[0]}: "
                "features of different models have no colours in common, colour them apart"
            )
        if not torch.isfinite(m).all():
            raise ValueError("expected finite features, got NaN or infinity: look at the model's output first")


def _principal_components(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Project tokens (N, C) on their first three principal directions; zeros where there is no variance."""
    centred = tokens - tokens.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(tokens))  # ascending
    values, vectors = values.flip(0)[:3].clamp_min(0), vectors.flip(1)[:, :3]
    # Below this a direction is rounding noise, and stretching it to full colour would show patterns that are not there.
    # The tokens come in float32 at best, whose rounding is relative to the values and not to their spread.
    noise = (torch.finfo(torch.float32).eps * tokens.abs().max()) ** 2
    real = values > noise
    projected = centred @ vectors * real  # (N, <= 3)
    projected = projected * _signs(projected, vectors)
    total = centred.square().sum() / len(tokens)
    explained = torch.where(real, values / total.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    missing = 3 - projected.shape[1]
    return torch.nn.functional.pad(projected, (0, missing)), torch.nn.functional.pad(explained, (0, missing))


def _signs(projected: Tensor, vectors: Tensor) -> Tensor:
    """Choose +1 or -1 for each component, from its values (N, k) and loadings (C, k): (k,)."""
    # The largest loading alone would do, but among hundreds two of opposite sign are often nearly as large: a small
    # change of the features would then turn all colours over.
    loading = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0]
    spread = projected.square().mean(0).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    skewness = (projected / spread).pow(3).mean(0)
    return torch.where(torch.where(skewness.abs() > 1e-6, skewness, loading) < 0, -1.0, 1.0)


def _stretch(column: Tensor, percentiles: tuple[float, float]) -> Tensor:
    """Map a component (N,) to 0..1 between two percentiles, clipped; 0.5 where it does not vary."""
    ordered = column.sort().values  # torch.quantile stops at 2^24 values
    low, high = (ordered[round(p / 100 * (len(ordered) - 1))] for p in percentiles)
    if low == high:  # the variance sits in less than one per cent of the patches: show those
        low, high = ordered[0], ordered[-1]
    if low == high:
        return torch.full_like(column, NEUTRAL)
    return ((column - low) / (high - low)).clamp(0, 1)
