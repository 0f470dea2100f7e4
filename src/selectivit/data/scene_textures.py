"""Colours, noise and the backgrounds of rendered scenes."""

from __future__ import annotations

import numpy as np
from PIL import Image

Array = np.ndarray

COLORS = {
    "red": (0.86, 0.1, 0.1),
    "orange": (0.98, 0.52, 0.05),
    "yellow": (0.96, 0.88, 0.12),
    "green": (0.1, 0.62, 0.18),
    "blue": (0.12, 0.28, 0.88),
    "purple": (0.5, 0.14, 0.66),
    "pink": (0.98, 0.52, 0.74),
    "brown": (0.42, 0.24, 0.1),
    "black": (0.08, 0.08, 0.09),
    "white": (0.94, 0.94, 0.94),
}


def smooth_noise(rng: np.random.Generator, height: int, width: int, cell: float, cell_y: float | None = None) -> Array:
    """Noise in 0..1 that changes over some pixels.

    Args:
        rng: where chance comes from.
        height: in pixels.
        width: in pixels.
        cell: pixels over which it changes, across.
        cell_y: the same downward; None is as across.

    Returns:
        (height, width) float32.

    Example:
        >>> smooth_noise(np.random.default_rng(0), 4, 6, 3).shape
        (4, 6)
    """
    rows = max(2, round(height / (cell_y or cell)) + 2)
    columns = max(2, round(width / cell) + 2)
    grid = Image.fromarray(rng.random((rows, columns), np.float32))
    return np.asarray(grid.resize((width, height), Image.Resampling.BILINEAR))


def _tinted(rng: np.random.Generator, color: tuple[float, float, float], light: Array) -> Array:
    """(h, w, 3): a colour, a little off, times a brightness (h, w)."""
    return np.asarray(color + rng.uniform(-0.04, 0.04, 3), np.float32) * light[..., None]


def _sky(rng: np.random.Generator, h: int, w: int) -> Array:
    down = np.linspace(0, 1, h, dtype=np.float32)[:, None, None]
    blue = _tinted(rng, (0.3, 0.58, 0.95), np.ones((h, w), np.float32)) + down * np.array(
        [0.35, 0.25, 0.04], np.float32
    )
    cloud = 0.65 * smooth_noise(rng, h, w, 60, 30) + 0.35 * smooth_noise(rng, h, w, 18, 10)
    cover = np.clip((cloud - rng.uniform(0.45, 0.6)) * 5, 0, 0.95)[..., None]
    return blue + cover * (0.97 - blue)


def _grass(rng: np.random.Generator, h: int, w: int) -> Array:
    light = 0.45 + 0.7 * smooth_noise(rng, h, w, 2.5, 9) + 0.25 * smooth_noise(rng, h, w, 40)
    return _tinted(rng, (0.26, 0.56, 0.14), light)


def _wood(rng: np.random.Generator, h: int, w: int) -> Array:
    plank = rng.uniform(22, 40)
    rows = (np.arange(h) + rng.uniform(0, plank)) / plank
    tone = rng.uniform(0.8, 1.1, int(rows[-1]) + 2)[rows.astype(int)]
    light = (
        (0.75 + 0.4 * smooth_noise(rng, h, w, 50, 2.5)) * tone[:, None] * np.where(rows % 1 < 0.07, 0.45, 1)[:, None]
    )
    return _tinted(rng, (0.64, 0.42, 0.22), light.astype(np.float32))


def _brick(rng: np.random.Generator, h: int, w: int) -> Array:
    tall = rng.uniform(13, 22)
    y = np.arange(h)[:, None] / tall + rng.uniform(0, 1)
    x = np.arange(w)[None] / (2.2 * tall) + 0.5 * (y.astype(int) % 2)
    tones = rng.uniform(0.75, 1.15, (int(y.max()) + 1, int(x.max()) + 1)).astype(np.float32)
    mortar = (y % 1 < 0.13) | (x % 1 < 0.07)
    light = tones[y.astype(int), x.astype(int)] * (0.85 + 0.3 * rng.random((h, w), np.float32))
    return np.where(mortar[..., None], np.float32(0.78), _tinted(rng, (0.66, 0.28, 0.2), light))


def _water(rng: np.random.Generator, h: int, w: int) -> Array:
    phase = np.arange(h, dtype=np.float32)[:, None] / rng.uniform(1.6, 3.2) + 9 * smooth_noise(rng, h, w, 45, 20)
    wave = 0.5 + 0.5 * np.sin(phase)
    return _tinted(rng, (0.05, 0.36, 0.52), 0.75 + 0.4 * wave) + 0.3 * (wave**6)[..., None]


def _sand(rng: np.random.Generator, h: int, w: int) -> Array:
    light = 0.72 + 0.3 * rng.random((h, w), np.float32) + 0.25 * smooth_noise(rng, h, w, 30, 14)
    return _tinted(rng, (0.85, 0.74, 0.5), light)


def _snow(rng: np.random.Generator, h: int, w: int) -> Array:
    shade = np.clip(1.5 * smooth_noise(rng, h, w, 50, 22) - 0.3, 0, 1)[..., None]
    snow = 0.97 - shade * np.array([0.26, 0.18, 0.06], np.float32)
    return snow + 0.12 * (rng.random((h, w, 1), np.float32) > 0.985)


def _tiles(rng: np.random.Generator, h: int, w: int) -> Array:
    side = rng.uniform(20, 34)
    y, x = np.arange(h)[:, None] / side + rng.uniform(0, 1), np.arange(w)[None] / side + rng.uniform(0, 1)
    tones = rng.uniform(0.85, 1.1, (int(y.max()) + 1, int(x.max()) + 1)).astype(np.float32)
    grout = (y % 1 < 0.1) | (x % 1 < 0.1)
    light = tones[y.astype(int), x.astype(int)] * (0.95 + 0.1 * smooth_noise(rng, h, w, 12))
    return np.where(grout[..., None], np.float32(0.25), _tinted(rng, (0.62, 0.66, 0.64), light))


BACKDROPS = {
    "sky": _sky,
    "grass": _grass,
    "wood": _wood,
    "brick": _brick,
    "water": _water,
    "sand": _sand,
    "snow": _snow,
    "tiles": _tiles,
}
