"""A distilled VECA by budget, beside a dense student of the same steps and their teacher: quality, FLOPs, time.

    python benchmarks/veca_distilled.py --veca FOLDER --dense FOLDER --photos FOLDER… --camvid FOLDER --out JSON

The folders are what `selectivit distill` and `benchmarks/dense_student.py` wrote; the photos must not be among those
trained on. Patch cosine to the teacher on middle crops; a linear probe on frozen tokens (BN + linear, see
`calibrated_probe.py`), trained on camvid's train split, mIoU on its val split; medians of interleaved forwards.
Times want a machine of their own: `--only times` and `--only quality` fill their part of the JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from calibrated_probe import probe, read_split
from dense_student import dense_student
from measuring import interleaved, machine, write
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import selectivit as sv
from selectivit.data.photos import open_photos
from selectivit.data.training_images import centre_crops
from selectivit.train.agreement import Agreement, means
from selectivit.train.pair import Pair

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
CROP, HEAD = 224, "distillation_head.safetensors"
SIZES = (224, 518)


def load_pair(student: nn.Module, folder: Path, teacher: nn.Module) -> Pair:
    pair = Pair(student, teacher, sizes=[CROP], grid="refuse")
    if list(pair.head.parameters()):
        pair.head.load_state_dict(load_file(folder / HEAD))
    return pair.eval()


def load_dense(folder: Path) -> nn.Module:
    model = dense_student()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


@torch.inference_mode()
def tokens(model: nn.Module, images: Tensor, **budget: int) -> Tensor:
    return torch.cat([sv.features(model, part, **budget).map.half() for part in images.split(4)])


@torch.inference_mode()
def timed(candidates: dict[str, tuple[nn.Module, dict[str, int]]], size: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds and counted GFLOPs of one image of size x size."""
    image = torch.randn(1, 3, size, size)
    calls: dict[str, Callable[[], Any]] = {
        name: partial(sv.features, model, image, **budget) for name, (model, budget) in candidates.items()
    }
    found = interleaved(calls, rounds)
    for name, call in calls.items():
        # The counter does not know the fused attention of CPUs.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            call()
        found[name] = {"ms": 1e3 * found[name]["median_s"], "gflops": counter.get_total_flops() / 1e9}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--veca", type=Path, required=True)
    parser.add_argument("--dense", type=Path, required=True)
    parser.add_argument("--teacher", default="dinov2-small")
    parser.add_argument("--photos", nargs="+", required=True, help="not trained on")
    parser.add_argument("--camvid", type=Path, required=True, help="folder with images/{train,val}, masks/{train,val}")
    parser.add_argument("--size", type=int, nargs=2, default=(364, 476), help="of the probe's images, pixels")
    parser.add_argument("--classes", type=int, default=11)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("times", "quality"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    teacher = sv.load_model(args.teacher)
    veca, dense = sv.load_model(args.veca), load_dense(args.dense)
    pairs = {"veca": load_pair(veca, args.veca, teacher), "dense": load_pair(dense, args.dense, teacher)}
    candidates: dict[str, tuple[nn.Module, dict[str, int]]] = {"dense": (dense, {})}
    candidates |= {f"veca, {cores} cores": (veca, {"num_cores": cores}) for cores in reversed(BUDGETS)}
    candidates["teacher"] = teacher, {}

    record: dict[str, Any] = {
        "question": "what a distilled VECA keeps of a dense student and of its teacher, by budget",
        "teacher": args.teacher,
        "crop": CROP,
        "probe": {"data": args.camvid.name, "size": list(args.size), "seeds": args.seeds},
        "machine": machine(),
    }
    earlier = json.loads(args.out.read_text())["rows"] if args.only and args.out.is_file() else []
    rows: dict[str, dict[str, Any]] = {name: {"model": name} for name in candidates} | {r["model"]: r for r in earlier}
    if args.only != "quality":
        for size in SIZES:
            for name, found in timed(candidates, size, args.rounds).items():
                rows[name][f"at {size} px"] = found
    record["rows"] = list(rows.values())
    write(args.out, record)
    if args.only == "times":
        return
    found, _ = open_photos(args.photos)
    crops, _ = centre_crops(found, range(len(found)), CROP)
    agreement = Agreement(crops, 8)
    train, train_masks = read_split(args.camvid, "train", tuple(args.size))
    val, val_masks = read_split(args.camvid, "val", tuple(args.size))
    for name, (model, budget) in candidates.items():
        row, pair = rows[name], pairs.get(name.partition(",")[0])
        if pair is not None:
            row |= means(agreement.sums(pair, None, budget.get("num_cores"))) | {"photos": len(crops)}
        maps = tokens(model, train, **budget), tokens(model, val, **budget)
        scores = [probe(*maps, train_masks, val_masks, args.classes, seed) for seed in range(args.seeds)]
        row |= {"miou": float(np.mean(scores)), "miou_per_seed": scores}
        write(args.out, record)  # after every row: a run that is stopped keeps what it has
        print({key: value for key, value in row.items() if key != "miou_per_seed"}, flush=True)


if __name__ == "__main__":
    main()
