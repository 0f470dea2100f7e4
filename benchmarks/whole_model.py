"""Time of a whole DINOv2-small with every layer on calibrated entmax-1.5, over the untouched model; per image size.

    python benchmarks/whole_model.py PHOTO… --out benchmarks/results/whole_model_cpu.json

One calibration on the photos at 518 pixels serves all sizes, as a user would have it. `--max-support` names bounds on
the calibration, none for the closest outputs.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, machine, photo_batch, write

import selectivit as sv
from selectivit.ops.kernels import cpu

SIZES = (224, 518, 700, 896)
ROUNDS = {224: 30, 518: 9, 700: 7, 896: 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="pixels a side")
    parser.add_argument("--max-support", type=float, nargs="+", default=[1.0, 0.25, 0.15], help="1 means no bound")
    args = parser.parse_args()
    plain = sv.load_model("dinov2-small")
    images = [photo_batch(plain, [photo], 518) for photo in args.photos[:4]]
    models: dict[str, Any] = {"softmax": plain, "entmax-1.5, not calibrated": swapped(plain, None)}
    for bound in args.max_support:
        calibration = sv.calibrate_swap(plain, images, max_support=None if bound >= 1 else bound)
        models[f"entmax-1.5, calibrated, support at most {bound:.0%}"] = swapped(plain, calibration)
    rows = []
    for size in args.sizes:
        image = photo_batch(plain, args.photos[:1], size)
        with torch.no_grad():
            runs = {name: (lambda model=model, image=image: model(image)) for name, model in models.items()}
            seconds = interleaved(runs, ROUNDS.get(size, 5))
        base = seconds["softmax"]["median_s"]
        ratios = {name: round(s["median_s"] / base, 3) for name, s in seconds.items()}
        print(size, ratios, flush=True)
        rows.append({"size": size, "tokens": (size // 14) ** 2 + 1, "seconds": seconds, "over_softmax": ratios})
    question = "seconds of DINOv2-small's forward with every layer on entmax-1.5, over the untouched model"
    write(args.out, {"question": question, "machine": machine(), "kernel": cpu.status(), "rows": rows})


def swapped(model: torch.nn.Module, calibration: Any) -> torch.nn.Module:
    """A copy whose layers are all swapped."""
    own = copy.deepcopy(model)
    sv.swap_attention(own, "entmax", 1.5, layers=None, scale=calibration)
    return own


if __name__ == "__main__":
    main()
