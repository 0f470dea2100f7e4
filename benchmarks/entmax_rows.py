"""Row-wise entmax-1.5 against the entmax package, on scores of a ViT's shape.

    python benchmarks/entmax_rows.py --out benchmarks/results/entmax_rows.json [PHOTO …]

Scores are (6 · 1370, 1370): normal ones of several widths and, where photos are given, those of DINOv2-small's layers
at 518 px. Every candidate's error is measured before its time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import entmax
import torch
from measuring import interleaved, machine, write
from torch import Tensor

import selectivit as sv
from selectivit.ops.reference import entmax_reference
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites

HEADS, N = 6, 1370


def real_scores(photos: list[Path], layers: tuple[int, ...]) -> dict[str, Tensor]:
    from selectivit.data.images import read_image
    from selectivit.data.transforms import to_tensor

    model, found = sv.load_model("dinov2-small"), {}
    expects = sv.preprocessing(model)
    sites, _ = find_sites(model)
    for photo in photos:
        picture = read_image(photo).image.resize((518, 518))
        image = to_tensor(picture, mean=expects.mean, std=expects.std, patch_size=expects.patch_size, size=518)
        with torch.no_grad(), recording(sites) as calls:
            sv.features(model, image)
        for layer in layers:
            (call,) = calls[sites[layer].name]
            scores = (call.q @ call.k.mT * call.scale).reshape(-1, N)
            found[f"DINOv2-small, {photo.stem}, layer {layer}"] = scores
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="*", default=(0, 6, 11))
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    inputs = {f"normal, width {w:g}": torch.randn(HEADS * N, N) * w for w in (0.3, 1.0, 3.0)}
    inputs |= real_scores(args.photos, tuple(args.layers))
    rows = []
    for name, x in inputs.items():
        candidates = {
            "selectivit.entmax15": lambda x=x: sv.entmax15(x),
            "entmax.entmax15": lambda x=x: entmax.entmax15(x, dim=-1),
            "entmax.entmax15 k=128": lambda x=x: entmax.entmax15(x, dim=-1, k=128),
            "torch.softmax": lambda x=x: x.softmax(-1),
        }
        expected = entmax_reference(x[::40])
        errors = {n: (run()[::40] - expected).abs().max().item() for n, run in list(candidates.items())[:3]}
        assert errors["selectivit.entmax15"] < 3e-6, errors
        times = interleaved(candidates, args.rounds)
        ours = times["selectivit.entmax15"]["median_s"]
        ratios = {n: t["median_s"] / ours for n, t in times.items()}
        support = (expected > 0).double().mean().item()
        rows.append({"scores": name, "support": support, "max_error": errors, "times": times, "times_ours": ratios})
        told = ", ".join(f"{n} {r:.2f}" for n, r in ratios.items() if n != "selectivit.entmax15")
        print(f"{name:40s} support {support:.3f}; time over ours: {told}", flush=True)
    question = "row-wise entmax-1.5 of (8220, 1370) float32 scores: time of others over ours"
    write(args.out, {"question": question, "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
