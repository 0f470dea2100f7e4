"""CPU time of a training step of VECA tiny and of timm's dense ViT-tiny, in one process, interleaved.

    python benchmarks/veca_training.py --out benchmarks/results/veca_training.json

Forward, backward and fused AdamW under bfloat16 autocast, random images, both projected to a teacher's width, on one
thread. CPU time of the process, not wall time: other work on the machine then counts little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from measuring import machine, write
from torch import Tensor, nn

import selectivit as sv

PIXELS, PATCH, TEACHER_DIM = 224, 14, 384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 16])
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = torch.randn(args.batch, 3, PIXELS, PIXELS)
    dense = Dense()
    steps = {"dense": step(dense, lambda: dense(images))}
    veca = sv.create_model("veca_tiny_patch14", out_dim=TEACHER_DIM)
    for budget in args.budgets:
        steps[f"veca {budget}"] = step(veca, lambda budget=budget: projected(veca(images, num_cores=budget)))
    rows = timed(steps, args.batch, args.rounds)
    question = "images/s of a training step, tiny models, bfloat16 autocast"
    write(args.out, {"question": question, "machine": machine(), "timm": timm.__version__, "rows": rows})


class Dense(nn.Module):
    """timm's ViT-tiny with a projection of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = timm.create_model("vit_tiny_patch16_224", patch_size=PATCH, img_size=PIXELS, num_classes=0)
        self.head = nn.Linear(self.vit.embed_dim, TEACHER_DIM)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The class token and the patches, each as wide as the teacher's."""
        tokens = self.head(self.vit.forward_features(images))
        return tokens[:, 0], tokens[:, 1:]


def projected(out: Any) -> tuple[Tensor, Tensor]:
    return out.projected_cls, out.projected_patches


def step(model: nn.Module, forward: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """One step of training with a loss that costs next to nothing."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = forward()
        sum(t.float().square().mean() for t in found).backward()
        optimizer.step()

    return run


def timed(steps: dict[str, Callable[[], None]], batch: int, rounds: int) -> list[dict[str, Any]]:
    """Images a second of CPU time by the median step, all of them in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        run()
    for _ in range(rounds):
        for name, run in steps.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name}: {median:.2f} s a step, {batch / median:.1f} images/s", flush=True)
        rows.append({"model": name, "median_s": median, "seconds": times, "images_per_s": batch / median})
    return rows


if __name__ == "__main__":
    main()
