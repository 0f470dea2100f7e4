"""Softmax, four registers, specialization and entmax-1.5, pretrained by DINO at equal steps: what keeps patches sharp?

Each variant is trained from scratch with each seed, on the same photos in the same order; variants of one seed start
with the same weights. Its frozen teacher is then judged by a linear probe on patch tokens (mIoU on CamVid at the masks'
own resolution), and by k-NN where the photos lie in one sub-folder a class. Untrained weights are the floor.

    python benchmarks/pretraining_comparison.py PHOTOS --camvid CAMVID --out RESULT.json

Give the command again after a stop: trainings go on where they were, finished rows are kept. With the defaults (a tiny
ViT, 96 px, 2000 steps of 64 photos, 4 variants, 3 seeds) 1.5 million photos are seen; each training tells how long it
will take. `--steps 20 --seeds 1 --batch-size 8` shows in minutes that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from calibrated_probe import extract, measured_support, probe, read_split
from measuring import machine, write

from selectivit.data.multi_crop import Crops
from selectivit.models.weights import load_model
from selectivit.train.dino_pair import DinoPair
from selectivit.train.dino_settings import PRESETS, DinoSettings
from selectivit.train.pretrain import pretrain
from selectivit.train.settings import Running

CLASSES = 11  # of CamVid; indices from here on are void
NUMBERS = ("miou", "knn_top1", "support", "divergence", "information", "feature_spread")


def settings_of(variant: str, seed: int, args: argparse.Namespace) -> DinoSettings:
    crops = Crops(args.global_size, local_size=args.local_size, num_local=args.num_local)
    return DinoSettings(
        **PRESETS[variant],
        model=args.model,
        crops=crops,
        steps=args.steps,
        epochs=100,
        batch_size=args.batch_size,
        lr=args.lr,
        out_dim=args.out_dim,
        teacher_momentum=args.teacher_momentum,
        seed=seed,
    )


def train(variant: str, seed: int, args: argparse.Namespace) -> tuple[Any, dict[str, float]]:
    """The frozen teacher, and what its training says."""
    settings, started, first = settings_of(variant, seed, args), time.time(), []

    def tell(report: Any) -> None:
        first.append(report.step)
        if report.step % 50 == 0 or report.step in (first[0] + 2, report.steps):
            pace = (time.time() - started) / len(first)
            left = pace * (report.steps - report.step) / 60
            print(
                f"{variant} {seed}: step {report.step}/{report.steps}, {report.values['loss']:.3f}, {left:.0f} min left"
            )

    out = args.work / f"{variant}-{seed}"
    result = pretrain(args.photos, out, settings, Running(args.device, args.workers), tell=tell)
    told = {name: result.values[name] for name in ("loss", "divergence", "information", "feature_spread")}
    return load_model(result.final), {**told, **result.validation, "warnings": len(result.warnings)}


def judge(model: Any, args: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    maps = [extract(model, data[split][0]) for split in ("train", "val")]
    masks = [data[split][1] for split in ("train", "val")]
    scores = [probe(*maps, *masks, CLASSES, seed) for seed in range(args.probe_seeds)]
    return {"miou": statistics.mean(scores), "support": measured_support(model, data["val"][0][::25])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="+", help="photos without labels, or one sub-folder a class")
    parser.add_argument(
        "--camvid", type=Path, required=True, help="folder with images/{train,val} and masks/{train,val}"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("pretraining_comparison"), help="folder of the trainings")
    parser.add_argument("--variants", nargs="*", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="dino_vit_tiny_patch16")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--global-size", type=int, default=96, help="pixels")
    parser.add_argument("--local-size", type=int, default=48, help="pixels")
    parser.add_argument("--num-local", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak rate for a batch of 256")
    parser.add_argument("--out-dim", type=int, default=4096)
    parser.add_argument("--teacher-momentum", type=float, default=0.99, help="DINO's 0.996 is for longer trainings")
    parser.add_argument("--size", type=int, nargs=2, default=(240, 320), help="height and width of the probe, pixels")
    parser.add_argument("--probe-seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    kept = {"out", "work", "device", "workers", "variants", "seeds", "photos", "camvid"}
    settings = {name: value for name, value in vars(args).items() if name not in kept}
    settings["size"] = list(args.size)
    record: dict[str, Any] = {
        "question": "mIoU of a linear probe on patches after DINO's pretraining at equal steps",
        "settings": settings,
        "machine": machine(),
        "rows": [],
    }
    if args.out.is_file():
        record = json.loads(args.out.read_text())
        if record["settings"] != settings:
            raise SystemExit(f"{args.out} holds rows of other settings: choose another --out")
    data = {split: read_split(args.camvid, split, tuple(args.size)) for split in ("train", "val")}
    done = {(row["variant"], row["seed"]) for row in record["rows"]}
    for seed in range(args.seeds):
        for variant in ("untrained", *args.variants):
            if (variant, seed) in done:
                continue
            if variant == "untrained":
                model, told = DinoPair(settings_of("cls", seed, args)).teacher.eval(), {}
            else:
                model, told = train(variant, seed, args)
            row = {"variant": variant, "seed": seed, **told, **judge(model, args, data)}
            record["rows"].append(row)
            record["summary"] = summary(record["rows"])
            write(args.out, record)  # after every row: what is stopped keeps what it has
            print(row, flush=True)
    print(json.dumps(record["summary"], indent=1))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds."""
    found: dict[str, Any] = {}
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        for name in NUMBERS:
            values = [row[name] for row in mine if name in row]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else None
                found.setdefault(variant, {})[name] = {"mean": statistics.mean(values), "std": spread, "n": len(values)}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
