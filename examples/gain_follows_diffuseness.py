"""Claim: the more of softmax's attention lies on other classes, the more entmax gains; a concentrated head may lose.

python examples/gain_follows_diffuseness.py open_clip:ViT-B-16/openai VOCdevkit/VOC2012 --photos 100

Source: arXiv 2607.07135. `selectivit analyse gain` does the same with a picture, resumable, for several models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

import selectivit as sv
from selectivit.data.segmentation import open_segmentation
from selectivit.data.transforms import to_tensor
from selectivit.eval.diffuseness import MEASURES, diffuseness
from selectivit.models.clip import load_clip
from selectivit.openvocab.evaluate import evaluate_segmentation, segmenter_for
from selectivit.openvocab.presets import PRESETS
from selectivit.ops.selective import AttentionRule

SOURCES = ("qk", "qq", "kk", "vv", "qq+kk", "qq+kk+vv")


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="CLIP: a name or a local folder")
    parser.add_argument("data", help="folder of photos and masks")
    parser.add_argument("--photos", type=int, default=50, help="the first so many (default 50)")
    parser.add_argument("--size", type=int, default=448, help="shorter side in pixels (default 448)")
    options = parser.parse_args(argv)
    clip, data = load_clip(options.model), open_segmentation(options.data)
    numbers, fit = range(min(options.photos, len(data))), sv.preprocessing(clip[0])
    background = 0 if data.classes[0] == "background" else None

    rules, total = [AttentionRule("softmax", scores=source) for source in SOURCES], None
    for i in numbers:
        image = to_tensor(data.image(i), mean=fit.mean, std=fit.std, patch_size=fit.patch_size, size=options.size)
        one = diffuseness(clip[0], image, data.mask(i), rules, -1, background=background)
        total = one if total is None else total + one
    assert total is not None
    elsewhere = total.means()[0, :, MEASURES.index("other_classes")].mean(-1)  # (sources,), over the last layer's heads

    gains = []
    print("source    mass on other classes  gain of entmax (points of mIoU)")
    for source, mass in zip(SOURCES, elsewhere.tolist(), strict=True):
        base = replace(PRESETS[f"entmax-{source}"], size=options.size)
        plain, sparse = (
            100 * evaluate_segmentation(segmenter_for(clip, data, preset), data, numbers=numbers).miou
            for preset in (replace(base, normalizer="softmax"), base)
        )
        gains.append(sparse - plain)
        print(f"{source:8}  {mass:21.3f}  {gains[-1]:+.2f}")
    r = torch.corrcoef(torch.stack([elsewhere, torch.tensor(gains, dtype=elsewhere.dtype)]))[0, 1].item()
    print(f"correlation: {r:.2f} over {len(SOURCES)} sources")
    return r


if __name__ == "__main__":
    main()
