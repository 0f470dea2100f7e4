"""Claim: entmax in the last layer helps most where scores are self-correlations (qq, kk, vv), and qk stays behind.

python examples/self_correlation.py open_clip:ViT-B-16/openai VOCdevkit/VOC2012 --photos 100

Source: Sparse Attention for Dense Open-Vocabulary Prediction in CLIP, arXiv 2607.07135. Reported on VOC, ViT-B/16,
softmax → entmax: qk 13.4 → 23.3, qq 33.2 → 42.6, kk 21.3 → 30.1, vv 45.3 → 42.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from selectivit.data.segmentation import open_segmentation
from selectivit.models.clip import load_clip
from selectivit.openvocab.evaluate import evaluate_segmentation, segmenter_for
from selectivit.openvocab.presets import PRESETS

SOURCES = ("qk", "qq", "kk", "vv", "qq+kk", "qq+kk+vv")


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="CLIP: a name or a local folder")
    parser.add_argument("data", help="folder of photos and masks")
    parser.add_argument("--photos", type=int, default=50, help="the first so many (default 50)")
    parser.add_argument("--size", type=int, default=448, help="shorter side in pixels (default 448)")
    options = parser.parse_args(argv)
    clip, data = load_clip(options.model), open_segmentation(options.data)
    numbers = range(min(options.photos, len(data)))
    found: dict[str, tuple[float, float]] = {}
    print("source    softmax  entmax    gain   (mIoU, %)")
    for source in SOURCES:
        base = replace(PRESETS[f"entmax-{source}"], size=options.size)
        plain, sparse = (
            100 * evaluate_segmentation(segmenter_for(clip, data, preset), data, numbers=numbers).miou
            for preset in (replace(base, normalizer="softmax"), base)
        )
        found[source] = plain, sparse
        print(f"{source:8}  {plain:7.2f} {sparse:7.2f} {sparse - plain:+7.2f}")
    return found


if __name__ == "__main__":
    main()
