"""Rendered scenes: pictures of objects on textured backgrounds, with the exact class of every pixel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from selectivit.data.scene_layouts import CLASSES, SHAPES, Layout, Thing, draw_layout
from selectivit.data.scene_textures import BACKDROPS, COLORS, smooth_noise

Array = np.ndarray
OVER = 2  # sub-pixels a side, for soft edges


@dataclass(frozen=True)
class Scene:
    """A picture and what is in it.

    Args:
        image: (H, W, 3) uint8.
        mask: (H, W) uint8, places in `CLASSES`.
        instances: (H, W) uint8, 0 for background, else 1 + the object's place in `layout.things`.
        layout: what was rendered.
    """

    image: Array
    mask: Array
    instances: Array
    layout: Layout

    def boxes(self) -> dict[int, tuple[int, int, int, int]]:
        """Of each object that is seen: its place in `layout.things`, and left, top, width, height of what is seen."""
        found = {}
        for i in range(len(self.layout.things)):
            rows, columns = np.nonzero(self.instances == i + 1)
            if len(rows):
                left, top = int(columns.min()), int(rows.min())
                found[i] = (left, top, int(columns.max()) - left + 1, int(rows.max()) - top + 1)
        return found


def scene(seed: int, index: int, size: tuple[int, int] = (240, 320)) -> Scene:
    """The scene of a number: the same for the same seed, index and size.

    Args:
        seed: of the series.
        index: which of the series.
        size: (height, width) in pixels.

    Returns:
        The scene.

    Example:
        >>> one = scene(0, 5)
        >>> one.image.shape, bool((one.mask == scene(0, 5).mask).all())
        ((240, 320, 3), True)
    """
    return render(draw_layout(np.random.default_rng([seed, index]), size))


def render(layout: Layout) -> Scene:
    """Draw a layout.

    Args:
        layout: what stands where.

    Returns:
        The scene.
    """
    rng = np.random.default_rng(layout.seed)
    height, width = layout.height, layout.width
    image = BACKDROPS[layout.backgrounds[0]](rng, height, width)
    mask = np.full((height, width), CLASSES.index(layout.backgrounds[0]), np.uint8)
    if len(layout.backgrounds) > 1:
        edge = (layout.horizon + 0.06 * (smooth_noise(rng, 1, width, 60)[0] - 0.5)) * height
        below = np.arange(height)[:, None] >= edge
        image = np.where(below[..., None], BACKDROPS[layout.backgrounds[1]](rng, height, width), image)
        mask[below] = CLASSES.index(layout.backgrounds[1])
    instances = np.zeros((height, width), np.uint8)
    for i, thing in enumerate(layout.things):
        _draw(image, mask, instances, i, thing, rng)
    return Scene((image.clip(0, 1) * 255 + 0.5).astype(np.uint8), mask, instances, layout)


def _draw(image: Array, mask: Array, instances: Array, number: int, thing: Thing, rng: np.random.Generator) -> None:
    """Draw a thing over what is there, in place."""
    reach = thing.radius * 1.12 + 1
    left, right = (int(np.clip(v, 0, image.shape[1])) for v in (thing.x - reach, thing.x + reach + 1))
    top, bottom = (int(np.clip(v, 0, image.shape[0])) for v in (thing.y - reach, thing.y + reach + 1))
    if left >= right or top >= bottom:
        return
    u, v = _own_axes(thing, top, bottom, left, right, OVER)
    if thing.material == "furry":
        u = u + rng.uniform(-0.09, 0.09, u.shape).astype(np.float32)
        v = v + rng.uniform(-0.09, 0.09, v.shape).astype(np.float32)
    inside = OUTLINES[thing.shape](u, v).astype(np.float32)
    cover = inside.reshape(bottom - top, OVER, right - left, OVER).mean((1, 3))
    u, v = _own_axes(thing, top, bottom, left, right, 1)
    paint, opacity = _paint(thing, u, v, rng)
    alpha = (cover * opacity)[..., None]
    place = (slice(top, bottom), slice(left, right))
    image[place] += alpha * (paint - image[place])
    mask[place][cover >= 0.5] = SHAPES.index(thing.shape)
    instances[place][cover >= 0.5] = number + 1


def _own_axes(thing: Thing, top: int, bottom: int, left: int, right: int, over: int) -> tuple[Array, Array]:
    """Coordinates of (sub-)pixels on the thing's own axes, its radius being 1, v downward."""
    y = (np.arange((bottom - top) * over, dtype=np.float32) + 0.5) / over + top - thing.y
    x = (np.arange((right - left) * over, dtype=np.float32) + 0.5) / over + left - thing.x
    cos, sin = np.float32(np.cos(thing.angle) / thing.radius), np.float32(np.sin(thing.angle) / thing.radius)
    return cos * x[None] + sin * y[:, None], cos * y[:, None] - sin * x[None]


def _star(u: Array, v: Array) -> Array:
    turn = np.pi / 5
    angle = np.abs((np.arctan2(u, -v) + turn) % (2 * turn) - turn)
    x, y = np.hypot(u, v) * np.cos(angle), np.hypot(u, v) * np.sin(angle)
    inner_x, inner_y = 0.42 * np.cos(turn), 0.42 * np.sin(turn)
    return (x - 1) * inner_y - y * (inner_x - 1) < 0


def _heart(u: Array, v: Array) -> Array:
    x, y = 1.2 * u, 0.12 - 1.15 * v
    return (x * x + y * y - 1) ** 3 < x * x * y**3


def _bottle(u: Array, v: Array) -> Array:
    x = np.abs(u)
    return (
        ((x < 0.45) & (v > -0.15) & (v < 0.97)) | ((x < 0.18) & (v > -0.97) & (v < 0)) | (x**2 + (v + 0.1) ** 2 < 0.2)
    )


def _arrow(u: Array, v: Array) -> Array:
    x = np.abs(v)
    return ((u > -0.97) & (u < 0.1) & (x < 0.27)) | ((u >= 0.05) & (x < 0.9 * (0.97 - u)))


OUTLINES: dict[str, Callable[[Array, Array], Array]] = {
    "ball": lambda u, v: u * u + v * v < 1,
    "box": lambda u, v: np.maximum(np.abs(u), np.abs(v)) < 0.82,
    "triangle": lambda u, v: (v < 0.75) & (np.abs(u) < 0.57 * (v + 1)),
    "star": _star,
    "heart": _heart,
    "ring": lambda u, v: np.abs(u * u + v * v - 0.64) < 0.36,
    "cross": lambda u, v: (np.minimum(np.abs(u), np.abs(v)) < 0.3) & (np.maximum(np.abs(u), np.abs(v)) < 0.95),
    "moon": lambda u, v: (u * u + v * v < 1) & ((u - 0.5) ** 2 + v * v > 0.64),
    "arrow": _arrow,
    "bottle": _bottle,
}


def _paint(thing: Thing, u: Array, v: Array, rng: np.random.Generator) -> tuple[Array, Array | float]:
    """Colours (h, w, 3) and opacity of a thing's pixels."""
    color = np.clip(np.array(COLORS[thing.color], np.float32) + rng.uniform(-0.06, 0.06, 3), 0, 1).astype(np.float32)
    light = color @ np.array([0.3, 0.6, 0.1], np.float32) > 0.5
    second = color * 0.3 if light else 0.2 * color + 0.8
    share = _pattern(thing, u, v, rng)[..., None]
    paint = color + share * (second - color)
    return _material(thing, paint, u, v, rng)


def _pattern(thing: Thing, u: Array, v: Array, rng: np.random.Generator) -> Array:
    """(h, w): 1 where the second colour shows."""
    period = max(7.0, thing.radius * rng.uniform(0.28, 0.5)) / thing.radius
    angle = rng.uniform(0, np.pi)
    p, q = (np.cos(angle) * u + np.sin(angle) * v) / period, (np.cos(angle) * v - np.sin(angle) * u) / period
    if thing.pattern == "striped":
        return (p % 1 < 0.45).astype(np.float32)
    if thing.pattern == "dotted":
        return ((p % 1 - 0.5) ** 2 + (q % 1 - 0.5) ** 2 < 0.1).astype(np.float32)
    if thing.pattern == "checkered":
        return ((p % 1 < 0.5) ^ (q % 1 < 0.5)).astype(np.float32)
    return np.zeros_like(p)


def _material(thing: Thing, paint: Array, u: Array, v: Array, rng: np.random.Generator) -> tuple[Array, Array | float]:
    spot = np.exp(-((u + 0.3) ** 2 + (v + 0.35) ** 2) / 0.06)[..., None]
    round_off = (1.05 - 0.25 * (u * u + v * v))[..., None]
    if thing.material == "shiny":
        return paint * (1.1 - 0.5 * (u * u + v * v)[..., None]) + 0.95 * spot, 1.0
    if thing.material == "metal":
        gleam = (0.55 + 0.55 * np.sin(5 * (v + 0.5 * u) + rng.uniform(0, 6)))[..., None]
        return (0.6 * paint + 0.4 * paint.mean(-1, keepdims=True)) * (0.45 + gleam) + 0.25 * gleam**3, 1.0
    if thing.material == "wooden":
        height, width = u.shape
        wobble = smooth_noise(rng, height, width, 24)
        grain = np.sin(thing.radius * 0.9 * (v + 0.35 * wobble))[..., None]
        return (0.8 * paint + 0.2 * np.array([0.5, 0.32, 0.15], np.float32)) * (0.85 + 0.25 * grain), 1.0
    if thing.material == "furry":
        hair = rng.random(u.shape, np.float32)
        hair = 0.5 * (hair + np.roll(hair, 1, 0))
        return paint * (0.45 + 1.0 * hair[..., None]) * round_off + 0.12 * hair[..., None], 1.0
    if thing.material == "glass":
        return paint * 1.1 + 0.9 * spot + 0.15, 0.5 + 0.4 * spot[..., 0]
    return paint * round_off, 1.0


def to_image(pixels: Array) -> Image.Image:
    """A picture (H, W, 3) or mask (H, W) of uint8 as PIL has it."""
    return Image.fromarray(pixels)
