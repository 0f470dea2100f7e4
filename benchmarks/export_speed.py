"""Time of a model's features and of its exported files: softmax beside calibrated entmax, torch beside onnxruntime."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from measuring import interleaved, machine, write

import selectivit as sv
from selectivit.export.check import onnx_runner, torch_runner


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dinov2-small")
    parser.add_argument("--pixels", type=int, nargs="+", default=[224, 518])
    parser.add_argument("--photo", default="examples/astronaut.jpg")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("export_speed.json"))
    options = parser.parse_args()
    model = sv.load_model(options.model)
    photos = {px: sv.load_image(options.photo, sv.preprocessing(model), size=px) for px in options.pixels}
    calibration = sv.calibrate_swap(model, photos[options.pixels[0]], max_support=0.25)
    rows = []
    for attention in ("softmax", "entmax"):
        swap = nullcontext()
        if attention == "entmax":
            swap = sv.swap_attention(model, "entmax", layers=None, scale=calibration)
        with swap, tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            runs = {"model": lambda x: sv.features(model, x)}
            sizes = {}
            for kind, runner in (("onnx", onnx_runner), ("torch", torch_runner)):
                with torch.inference_mode(False):
                    done = sv.export_features(model, Path(folder) / f"{kind}.pt2", format=kind)
                file = runner(done.path.read_bytes())
                runs[kind] = partial(lambda file, x: file(x, None), file)
                sizes[kind] = done.size
            for px, x in photos.items():
                found = interleaved({name: partial(run, x) for name, run in runs.items()}, options.repeats)
                rows.append({"attention": attention, "pixels": px, "times": found, "bytes": sizes})
                print(attention, px, {n: round(1000 * t["median_s"], 1) for n, t in found.items()}, "ms", flush=True)
    write(options.out, {"model": options.model, "machine": machine(), "results": rows})


if __name__ == "__main__":
    main()
