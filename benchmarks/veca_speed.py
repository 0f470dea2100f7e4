"""Time of whole VECA models over timm's DINOv3 architecture of the same size, in one process, interleaved.

    python benchmarks/veca_speed.py --out benchmarks/results/veca_speed.json

Random weights on both sides, no gradients. Beside each ratio of medians stands the ratio of FLOPs (`eval/cost.py`),
which it could not pass if both sides computed at one speed. They do not: VECA's float32 products go through oneDNN
(`ops/products.py`), timm's through `F.linear`; `--onednn off` times VECA on plain torch operators.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from measuring import interleaved, machine, write
from torch import nn

import selectivit as sv
from selectivit.eval.cost import flop_ratio
from selectivit.models.veca_config import SIZES
from selectivit.ops import products

PIXELS = (256, 512, 768, 1024)
ROUNDS = {256: 41, 512: 15, 768: 9, 1024: 7}  # a round at batch 1; fewer images a round at larger batches
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUDGETS = (64, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=["small", "base", "large"])
    parser.add_argument("--pixels", type=int, nargs="+", default=list(PIXELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rounds", type=float, default=1.0, help="factor on the number of rounds")
    parser.add_argument("--onednn", choices=["on", "off"], default="on", help="joined products for VECA")
    parser.add_argument("--compile", action="store_true", help="torch.compile both sides")
    args = parser.parse_args()
    if args.onednn == "off":
        products.onednn_serves = lambda *_: False
    rows = []
    for size in args.sizes:
        for dtype in args.dtypes:
            models = built(size, DTYPES[dtype], args.compile)
            for pixels in args.pixels:
                for batch in args.batches:
                    rounds = max(3, round(ROUNDS.get(pixels, 7) * args.rounds / (1 if batch == 1 else 2)))
                    rows.append(timed(size, dtype, pixels, batch, models, rounds))
    question = "time of timm's DINOv3 architecture over VECA's, random weights, whole model, inference"
    record = {"question": question, "machine": machine(), "timm": timm.__version__, "onednn": args.onednn}
    write(args.out, {**record, "compiled": args.compile, "rows": rows})


def built(size: str, dtype: torch.dtype, compiled: bool) -> dict[str, nn.Module]:
    """Both models of one size."""
    models = {
        "dinov3": timm.create_model(f"vit_{size}_patch16_dinov3", num_classes=0, dynamic_img_size=True),
        "veca": sv.create_model(f"veca_{size}_patch16"),
    }
    return {name: prepared(model.eval().to(dtype), compiled) for name, model in models.items()}


def prepared(model: nn.Module, compiled: bool) -> Any:
    return torch.compile(model) if compiled else model


def timed(size: str, dtype: str, pixels: int, batch: int, models: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One row: DINOv3, and VECA at each budget."""
    images = torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    veca, dinov3 = models["veca"], models["dinov3"]

    def at(budget: int) -> Callable[[], Any]:
        return lambda: veca(images, num_cores=budget)

    runs = {"dinov3": lambda: dinov3(images), **{f"veca {budget}": at(budget) for budget in BUDGETS}}
    with torch.no_grad():
        seconds = interleaved(runs, rounds)
    base = seconds["dinov3"]["median_s"]
    ratios = {name: round(base / s["median_s"], 3) for name, s in seconds.items() if name != "dinov3"}
    bound = {f"veca {b}": round(flop_ratio(size, SIZES[size], (pixels, pixels), b), 3) for b in BUDGETS}
    row = {"size": size, "dtype": dtype, "pixels": pixels, "batch": batch, "seconds": seconds}
    print(f"{size} {dtype} {pixels} px, batch {batch}: DINOv3 over VECA {ratios}, by FLOPs {bound}", flush=True)
    return {**row, "dinov3_over": ratios, "flop_ratio": bound}


if __name__ == "__main__":
    main()
