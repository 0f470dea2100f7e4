"""Batches of rendered scenes, captions and their words, made from the step's number; four scenes each differ little."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from selectivit.data.scene_layouts import ATTRIBUTES, CLASSES, SHORT, Layout, Thing, caption, draw_layout, vary
from selectivit.data.scene_rendering import render
from selectivit.openvocab.prompts import find_templates

MEAN, STD = 0.5, 0.25
KINDS = ("shape", "color", "pattern", "material")
WORDS = (*CLASSES, *(word for words in ATTRIBUTES.values() for word in words))
TEMPLATES = (*SHORT, *SHORT, *find_templates("imagenet80"))  # captions of one object, and the prompts of later use


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Args:
        until: the step where it ends.
        side: of the square scenes, in pixels.
        things: least and largest number of objects.
        radius: least and largest radius of objects, in pixels.
        captions: whether texts are contrasted with images, beside the words of captions told from images.
        dropped: share of the patches that are dropped.
        shapes: share of the fours whose scenes differ in their objects' shapes alone.
        plain: share of the fours whose objects are plain and matte.
    """

    until: int
    side: int
    things: tuple[int, int]
    radius: tuple[float, float]
    captions: bool = True
    dropped: float = 0.0
    shapes: float = 0.0
    plain: float = 0.0


class Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Images (B, 3, side, side), normalised, tokens (B, context) and words (B, `WORDS`) by the step's number.

    Args:
        stages: one after the other.
        batch: B, a multiple of 4.
        tokenizer: the model's.
        seed: of all that is drawn.
    """

    def __init__(self, stages: tuple[Stage, ...], batch: int, tokenizer, seed: int):
        self.stages, self.batch, self.tokenizer, self.seed = stages, batch, tokenizer, seed

    def __len__(self) -> int:
        return self.stages[-1].until

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        stage = next(stage for stage in self.stages if step < stage.until)
        rng = np.random.default_rng([self.seed, step])
        images, captions = [], []
        for _ in range(self.batch // 4):
            for layout, said in _four(stage, rng):
                images.append(_pixels(layout, stage.side))
                captions.append(caption(layout, rng, short=0.15, always=said, templates=TEMPLATES))
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
        return (pixels / 255 - MEAN) / STD, self.tokenizer(captions), named(captions)


def named(captions: list[str]) -> Tensor:
    """The words that captions name, as shares of each caption, (B, `WORDS`)."""
    hot = torch.tensor([[word in text.replace(",", "").split() for word in WORDS] for text in captions]).float()
    return hot / hot.sum(1, keepdim=True).clamp_min(1)


def _four(stage: Stage, rng: np.random.Generator) -> list[tuple[Layout, tuple[str, ...]]]:
    """A scene and three that differ from it in one respect each, with the attributes that tell them apart.

    Two scenes of five are drawn smaller and enlarged, so that blur and other sizes of patterns are known.
    """
    scale = float(rng.uniform(0.5, 1)) if rng.random() < 0.4 else 1.0
    side = max(32, round(stage.side * scale))
    radius = (stage.radius[0] * scale, stage.radius[1] * scale)
    base = draw_layout(rng, (side, side), stage.things, radius)
    plain = rng.random() < stage.plain
    if plain:
        base = replace(base, things=tuple(replace(t, pattern="plain", material="matte") for t in base.things))
    if rng.random() < stage.shapes:
        return [(scene, ("color",)) for scene in _other_shapes(base, rng)]
    chosen = [KINDS[i] for i in rng.choice(2 if plain else len(KINDS), 3, replace=plain)]
    said = tuple(kind for kind in KINDS if kind in chosen and kind != "shape")
    return [(base, said), *((vary(base, rng, kind), said) for kind in chosen)]


def _other_shapes(base: Layout, rng: np.random.Generator) -> list[Layout]:
    """A scene and three of other shapes, no two with the same largest object."""
    found = {_largest(base).shape: base}
    while len(found) < 4:
        other = vary(base, rng, "shape")
        found.setdefault(_largest(other).shape, other)
    return list(found.values())


def _largest(layout: Layout) -> Thing:
    return max(layout.things, key=lambda thing: thing.radius)


def _pixels(layout: Layout, side: int) -> np.ndarray:
    image = render(layout).image
    if layout.height == side:
        return image
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR))
