"""Time of entmax attention over torch's softmax attention on every layer of DINOv2-small, over several photos; a plot.

    python benchmarks/attention_layers.py PHOTO… --out benchmarks/results/attention_layers_cpu.json

Every layer is timed as its scores are, and with the factors per head that `calibrate_swap` fits on the same photos.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import interleaved, machine, photo_batch, write
from torch import Tensor

import selectivit as sv
from selectivit.ops.kernels import cpu
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites

SIZES = {224: 257, 518: 1370, 896: 4097}  # pixels a side: tokens
ROUNDS = {224: 60, 518: 15, 896: 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 518], help="pixels a side")
    parser.add_argument("--max-support", type=float, default=0.25, help="of the calibration")
    parser.add_argument("--rounds", type=float, default=1.0, help="factor on the number of rounds")
    args = parser.parse_args()
    model = sv.load_model("dinov2-small")
    rows: list[dict[str, Any]] = []
    for size in args.sizes:
        rounds = max(3, round(ROUNDS.get(size, 5) * args.rounds))
        images = [photo_batch(model, [photo], size) for photo in args.photos]
        factors = sv.calibrate_swap(model, images[:4], max_support=args.max_support).factors
        for photo, image in zip(args.photos, images, strict=True):
            rows += timed_layers(model, image, {"photo": photo.name, "size": size}, factors, rounds)
    question = "seconds of one layer's attention, entmax-1.5 over softmax, all layers of DINOv2-small"
    write(args.out, {"question": question, "machine": machine(), "kernel": cpu.status(), "rows": rows})
    draw(rows, args.out.with_suffix(".png"))


def timed_layers(model: Any, image: Tensor, about: dict[str, Any], factors: Any, rounds: int) -> list[dict[str, Any]]:
    sites = find_sites(model)[0]
    with torch.no_grad(), recording(sites) as calls:
        model(image)
    found = []
    for layer, site in enumerate(sites):
        call = calls[site.name][0]
        qkv = [t.detach().contiguous() for t in (call.q, call.k, call.v)]
        usual = qkv[0].shape[-1] ** -0.5
        for scores, scale in (("as they are", usual), ("calibrated", usual * factors[site.name].view(-1, 1, 1))):
            row = {**about, "layer": layer, "scores": scores, **timed(qkv, scale, rounds)}
            print({key: value for key, value in row.items() if key != "seconds"}, flush=True)
            found.append(row)
    return found


def timed(qkv: list[Tensor], scale: Any, rounds: int) -> dict[str, Any]:
    q, k, v = qkv
    p = sv.entmax(q[:, :, ::8] @ k.mT * scale, 1.5)
    forward = {
        "softmax": lambda: F.scaled_dot_product_attention(q, k, v),
        "entmax": lambda: sv.entmax_attention(q, k, v, scale=scale),
    }
    leaves = [t.clone().requires_grad_() for t in qkv]
    softmax_out = F.scaled_dot_product_attention(*leaves)
    entmax_out = sv.entmax_attention(*leaves, scale=scale)
    grad = torch.ones_like(softmax_out)
    backward = {
        "softmax": lambda: torch.autograd.grad(softmax_out, leaves, grad, retain_graph=True),
        "entmax": lambda: torch.autograd.grad(entmax_out, leaves, grad, retain_graph=True),
    }
    with torch.no_grad():
        seconds = {"forward": interleaved(forward, rounds)}
    seconds["backward"] = interleaved(backward, max(3, rounds // 3))
    ratios = {f"{what}_over_softmax": s["entmax"]["median_s"] / s["softmax"]["median_s"] for what, s in seconds.items()}
    rounded = {name: round(ratio, 3) for name, ratio in ratios.items()}
    return {"support": round(float((p > 0).float().mean()), 4), **rounded, "seconds": seconds}


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """One panel a size and pass: a dot a photo, a line through the medians, the scores' two scales in two colours."""
    from matplotlib.figure import Figure

    sizes = sorted({row["size"] for row in rows})
    figure = Figure(figsize=(5 * len(sizes), 7), layout="constrained")
    panels = figure.subplots(2, len(sizes), sharey="row", squeeze=False)
    for i, what in enumerate(("forward", "backward")):
        for j, size in enumerate(sizes):
            panel = panels[i][j]
            for scores, colour in (("as they are", "#0072B2"), ("calibrated", "#D55E00")):
                some = [row for row in rows if row["size"] == size and row["scores"] == scores]
                layers = sorted({row["layer"] for row in some})
                ratio = f"{what}_over_softmax"
                panel.plot([row["layer"] for row in some], [row[ratio] for row in some], ".", color=colour, alpha=0.5)
                medians = [
                    float(torch.tensor([row[ratio] for row in some if row["layer"] == layer]).median())
                    for layer in layers
                ]
                support = 100 * sum(row["support"] for row in some) / len(some)
                panel.plot(layers, medians, color=colour, label=f"scores {scores}: {support:.1f} % support")
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set_ylim(0, max(1.1, panel.get_ylim()[1]))
            panel.set_title(f"{what}, {SIZES.get(size, (size // 14) ** 2 + 1)} tokens", fontsize=11)
            panel.set_xlabel("layer")
            panel.legend(fontsize=9, frameon=False)
        panels[i][0].set_ylabel("time over softmax SDPA")
    figure.savefig(out, dpi=110)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
