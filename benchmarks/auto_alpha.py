"""Is α chosen by the image as good as softmax where attention is sharp, and as entmax where it is diffuse?

    python benchmarks/auto_alpha.py

Held-out scenes, a small CLIP trained on such scenes, mean IoU with the last block under each score source; attention is
made sharper by a temperature, as larger or longer trained models have it. Written to
benchmarks/results/auto_alpha.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from measuring import machine
from rich.progress import track
from scenes_segmentation import SEED, SIZE, Last

from selectivit.data.scene_rendering import scene
from selectivit.models.clip import load_clip
from selectivit.openvocab.auto import effective_tokens
from selectivit.openvocab.presets import Preset
from selectivit.ops.selective import attention_weights
from selectivit.swap.last_blocks import Entry, halves

SOURCES = ("qk", "qq", "kk", "vv", "qq+kk+vv")
TEMPERATURES = (1.0, 0.5, 0.25, 0.125)
WAYS = {
    "softmax": {"normalizer": "softmax"},
    "entmax 1.2": {"normalizer": "entmax", "alpha": 1.2},
    "entmax 1.5": {"normalizer": "entmax", "alpha": 1.5},
    "auto": {"normalizer": "entmax", "alpha": "auto"},
}


def diffuseness(last: Last, preset: Preset) -> list[float]:
    """Effective tokens of softmax per head, the mean over the first scenes, in shares of all tokens."""
    found = []

    def look(q, k, v, scale, mask):
        weights = attention_weights(q, k, v, replace(preset.rule(0)), scale=scale)
        found.append(effective_tokens(weights[:, :, 1:]).mean(0) / weights.shape[-1])
        return v

    entry: Entry = last.batches[0][0]
    with torch.no_grad():
        block = halves(last.tower, entry, entry.block, look)
        block.attention(block.norm(entry.tokens))
    return [round(share, 3) for share in found[0].tolist()]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    last = Last(load_clip(options.model), [scene(SEED, i) for i in range(options.scenes)])
    content = {"scenes": options.scenes, "seed": SEED, "machine": machine(), "rows": []}
    cases = [(kept, source, t) for kept in (True, False) for source in SOURCES for t in TEMPERATURES]
    for kept, source, temperature in track(cases, "cases"):
        base = Preset(scores=source, residual=kept, ffn=kept, size=SIZE, temperature=temperature)
        row = {"residual_and_ffn": kept, "scores": source, "temperature": temperature}
        row["effective_share"] = diffuseness(last, base)
        row["miou"] = {name: last.miou(replace(base, **way))["all"] for name, way in WAYS.items()}
        content["rows"].append(row)
        print(row)
    options.out.write_text(json.dumps(content, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="scenes", help="a CLIP of such scenes: a name or a folder")
    parser.add_argument("--scenes", type=int, default=40, help="how many held-out scenes")
    parser.add_argument("--threads", type=int, default=2)
    default = Path(__file__).parent / "results" / "auto_alpha.json"
    parser.add_argument("--out", type=Path, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
