"""How far is a run of train_clip.py? Shapes and attributes by words, on single objects.

    python examples/scenes/judge_clip.py RUN_FOLDER/model              # the embedded "scenes" unless told
    python examples/scenes/judge_clip.py RUN_FOLDER/model --side 64    # on scenes as in the second stage

Chance: 0.10 for shapes and colours, 0.25 for patterns, 0.17 for materials. It may be run while the training goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from batches import MEAN, STD, Stage
from torch import Tensor
from torch.nn import functional as F
from train_clip import placed

from selectivit.data.scene_layouts import ATTRIBUTES, SHAPES, Layout, draw_layout
from selectivit.data.scene_rendering import render
from selectivit.models.clip import load_clip
from selectivit.openvocab.prompts import find_templates, text_features

SEED, TEMPLATES = 9, find_templates("photo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="scenes", help="name or folder of the model")
    parser.add_argument("--side", type=int, default=112, choices=(32, 64, 112), help="of the scenes, in pixels")
    parser.add_argument("--scenes", type=int, default=200, help="how many held-out scenes")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    stage = Stage(until=1, side=options.side, things=(1, 1), radius=(0.2 * options.side, 0.45 * options.side))
    model, tokenizer = load_clip(options.model)
    for name, plain in (("plain and matte", True), ("of any look", False)):
        layouts = list(_layouts(options.scenes, stage, plain))
        seen = _seen(model, layouts, stage)
        found = {"shape": _right(seen, layouts, "shape", model, tokenizer)}
        if not plain:
            found |= {kind: _right(seen, layouts, kind, model, tokenizer) for kind in ATTRIBUTES}
        print(f"{name:16s} " + "  ".join(f"{kind} {share:.2f}" for kind, share in found.items()))


def _layouts(count: int, stage: Stage, plain: bool) -> Iterator[Layout]:
    for i in range(count):
        layout = draw_layout(np.random.default_rng([SEED, i]), (stage.side,) * 2, stage.things, stage.radius)
        things = tuple(replace(t, pattern="plain", material="matte") for t in layout.things)
        yield replace(layout, things=things) if plain else layout


@torch.no_grad()
def _seen(model, layouts: list[Layout], stage: Stage) -> Tensor:
    """Normalised image features; the tower is in training mode, so that only the scene's square of patches is read."""
    pixels = torch.from_numpy(np.stack([render(layout).image for layout in layouts])).permute(0, 3, 1, 2).float()
    model.visual.train()
    parts = [model.encode_image(placed(model, some, stage)) for some in ((pixels / 255 - MEAN) / STD).split(25)]
    model.visual.eval()
    return F.normalize(torch.cat(parts), dim=-1)


def _right(seen: Tensor, layouts: list[Layout], kind: str, model, tokenizer) -> float:
    """Share of scenes whose own word is the nearest: "star", or "red star" where an attribute is asked for."""
    words = SHAPES if kind == "shape" else ATTRIBUTES[kind]
    hits = 0
    for shape in SHAPES:
        rows = [i for i, layout in enumerate(layouts) if kind == "shape" or layout.things[0].shape == shape]
        texts = list(words) if kind == "shape" else [f"{word} {shape}" for word in words]
        nearest = (seen[rows] @ text_features(model, tokenizer, texts, TEMPLATES).T).argmax(1).tolist()
        hits += sum(words[n] == getattr(layouts[i].things[0], kind) for n, i in zip(nearest, rows, strict=True))
        if kind == "shape":
            break
    return hits / len(layouts)


if __name__ == "__main__":
    main()
