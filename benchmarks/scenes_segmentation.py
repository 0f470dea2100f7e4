"""Does entmax segment rendered scenes better than softmax, per score source and preset? With a CLIP trained on them.

    python benchmarks/scenes_segmentation.py

Held-out scenes, mean IoU over the 18 classes at the scenes' own size. Every preset through `OpenVocabularySegmenter`,
as published but for the size, 224 px without windows, about the scenes' own; and softmax against entmax per score
source, with the last block's residual and FFN kept and dropped. Written to benchmarks/results/scenes_segmentation.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from measuring import machine
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F

from selectivit.data.scene_layouts import CLASSES, SHAPES
from selectivit.data.scene_rendering import Scene, scene, to_image
from selectivit.data.transforms import to_tensor
from selectivit.models.clip import load_clip
from selectivit.openvocab.dense import image_tower, last_blocks
from selectivit.openvocab.presets import PRESETS, Preset
from selectivit.openvocab.prompts import find_templates, text_features
from selectivit.openvocab.segmenter import OpenVocabularySegmenter
from selectivit.swap.last_blocks import enter

SEED, SIZE, BATCH = 2026, 224, 8
QUESTION = "mean IoU in per cent on rendered scenes, softmax against entmax per score source, by a CLIP of such scenes"
SOURCES = ("qk", "qq", "kk", "vv", "qq+kk", "qq+kk+vv")


class Confusion:
    """Counts of (right class, found class) over pixels."""

    def __init__(self):
        self.counts = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.int64)

    def add(self, right: Tensor, found: Tensor) -> None:
        """Count the pixels of some maps."""
        pairs = right.flatten().long() * len(CLASSES) + found.flatten().long()
        self.counts += torch.bincount(pairs, minlength=self.counts.numel()).view_as(self.counts)

    def miou(self) -> dict[str, float]:
        """Mean IoU in per cent over all classes, over objects and over backgrounds."""
        hits = self.counts.diag()
        iou = 100 * hits / (self.counts.sum(0) + self.counts.sum(1) - hits).clamp_min(1)
        parts = {"all": iou, "objects": iou[: len(SHAPES)], "backgrounds": iou[len(SHAPES) :]}
        return {name: round(part.mean().item(), 2) for name, part in parts.items()}


def right_map(made: Scene) -> Tensor:
    return torch.from_numpy(made.mask)


class Last:
    """Scenes whose last block alone is left to run, so that many ways of attending cost little.

    Args:
        clip: (model, tokenizer).
        scenes: of one size.
        templates: of the prompts.
    """

    def __init__(self, clip, scenes: list[Scene], templates: str = "imagenet80"):
        self.model, tokenizer = clip
        self.tower = image_tower(self.model)
        self.texts = text_features(self.model, tokenizer, CLASSES, find_templates(templates))
        self.batches = list(self._batches(scenes))

    def _batches(self, scenes: list[Scene]) -> Iterator[tuple]:
        expected = self.tower.host.preprocessing(self.tower.module)
        options = {"mean": expected.mean, "std": expected.std, "patch_size": expected.patch_size, "size": SIZE}
        for start in range(0, len(scenes), BATCH):
            some = scenes[start : start + BATCH]
            pixels = torch.stack([to_tensor(to_image(made.image), **options) for made in some])
            with torch.no_grad():
                yield enter(self.tower, pixels, 1), torch.stack([right_map(made) for made in some])

    @torch.no_grad()
    def miou(self, preset: Preset) -> dict[str, float]:
        """Mean IoU with the last block under a preset."""
        confusion = Confusion()
        for entry, right in self.batches:
            dense = F.normalize(last_blocks(self.model, entry, preset).map, dim=1)
            cosines = torch.einsum("ce,behw->bchw", self.texts, dense)
            confusion.add(right, F.interpolate(cosines, right.shape[1:], mode="bilinear").argmax(1))
        return confusion.miou()


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    clip, scenes = load_clip(options.model), [scene(SEED, i) for i in range(options.scenes)]
    content = {"question": QUESTION, "scenes": len(scenes), "seed": SEED, "machine": machine()}
    content |= {"presets": {}, "sources": {}}
    for name, preset in track(PRESETS.items(), "presets"):
        content["presets"][name] = _end_to_end(clip, scenes, preset)
        print(f"{name:16s} {content['presets'][name]}")
    last = Last(clip, scenes)
    for block, kept in (("kept", True), ("dropped", False)):
        for source in ("v", *SOURCES):
            base = Preset(scores=source, residual=kept, ffn=kept, size=SIZE)
            ways: dict[str, Callable[[], Preset]] = {
                "softmax": lambda base=base: base,
                "entmax 1.2": lambda base=base: replace(base, normalizer="entmax", alpha=1.2),
                "entmax 1.5": lambda base=base: replace(base, normalizer="entmax", alpha=1.5),
                "random mask": lambda base=base: replace(base, normalizer="random_mask", alpha=1.2),
                "temperature 0.5": lambda base=base: replace(base, temperature=0.5),
            }
            found = {name: last.miou(make()) for name, make in ways.items() if source != "v" or name == "softmax"}
            content["sources"][f"{source}, residual and FFN {block}"] = found
            print(f"{source:9s} {block:8s} " + "  ".join(f"{name} {value['all']:.1f}" for name, value in found.items()))
    options.out.write_text(json.dumps(content, indent=1) + "\n")


def _end_to_end(clip, scenes: list[Scene], preset: Preset) -> dict[str, float]:
    at_size = replace(preset, size=SIZE, window=None, stride=None)
    segmenter, confusion = OpenVocabularySegmenter(clip, CLASSES, at_size), Confusion()
    for made in scenes:
        confusion.add(right_map(made), segmenter(to_image(made.image)).index_map)
    return confusion.miou()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="scenes", help="a CLIP of such scenes: a name or a folder")
    parser.add_argument("--scenes", type=int, default=100, help="how many held-out scenes")
    parser.add_argument("--threads", type=int, default=2)
    default = Path(__file__).parent / "results" / "scenes_segmentation.json"
    parser.add_argument("--out", type=Path, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
