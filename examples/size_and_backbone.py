"""Claim: the gap between softmax and entmax widens with resolution, and with larger backbones: the tail is longer.

python examples/size_and_backbone.py VOCdevkit/VOC2012 open_clip:ViT-B-16/openai open_clip:ViT-L-14/openai --photos 100

Source: arXiv 2607.07135. Reported on VOC, qq, softmax → entmax: B/16 35.1 → 41.8 at 224 px, 33.2 → 42.6 at 448; L/14
5.9 → 15.3 and 6.1 → 17.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from selectivit.data.segmentation import open_segmentation
from selectivit.models.clip import load_clip
from selectivit.openvocab.evaluate import evaluate_segmentation, segmenter_for
from selectivit.openvocab.presets import PRESETS


def main(argv: Sequence[str] | None = None) -> dict[tuple[str, int], float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of photos and masks")
    parser.add_argument("models", nargs="+", help="CLIPs: names or local folders")
    parser.add_argument("--scores", default="qq", help="score source (default qq)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 448], help="shorter sides (default 224 448)")
    parser.add_argument("--photos", type=int, default=50, help="the first so many (default 50)")
    options = parser.parse_args(argv)
    data = open_segmentation(options.data)
    numbers, gains = range(min(options.photos, len(data))), {}
    for model in options.models:
        clip = load_clip(model)
        for size in options.sizes:
            base = replace(PRESETS["entmax-qq"], scores=options.scores, size=size)
            plain, sparse = (
                100 * evaluate_segmentation(segmenter_for(clip, data, preset), data, numbers=numbers).miou
                for preset in (replace(base, normalizer="softmax"), base)
            )
            gains[model, size] = sparse - plain
            print(f"{model}  {size} px  softmax {plain:.2f}  entmax {sparse:.2f}  gap {sparse - plain:+.2f}")
    return gains


if __name__ == "__main__":
    main()
