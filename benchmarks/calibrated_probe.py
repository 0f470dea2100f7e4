"""How much of DINOv2-small's segmentation survives an untrained swap to entmax, with and without a calibration.

A linear probe on frozen patch tokens: trained on one folder of images and index masks, scored on another by mIoU at the
masks' own resolution. Rows: softmax, entmax at softmax's scale, entmax with one global factor, and calibrated entmax.

    python benchmarks/calibrated_probe.py CAMVID --out benchmarks/results/calibrated_probe.json

CAMVID holds images/{train,val} and masks/{train,val}, masks as PNG of class indices.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from measuring import machine, write
from PIL import Image
from torch import Tensor, nn

import selectivit as sv
from selectivit.ops.selective import attention_weights
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
SHARPER = 1.2  # on the factors of an adapted model: a smaller support for nothing
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def read_split(root: Path, split: str, size: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    images, masks = [], []
    for path in sorted((root / "images" / split).iterdir()):
        image = Image.open(path).convert("RGB").resize((size[1], size[0]), Image.Resampling.BICUBIC)
        images.append((torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - MEAN) / STD)
        masks.append(torch.from_numpy(np.array(Image.open(root / "masks" / split / f"{path.stem}.png"))).long())
    return torch.stack(images), masks


@torch.inference_mode()
def extract(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([sv.features(model, images[i : i + 4]).map.half() for i in range(0, len(images), 4)])


@torch.inference_mode()
def measured_support(model: nn.Module, images: Tensor) -> float:
    """Share of non-zero attention weights over all layers and heads, in the swapped model itself."""
    sites, _ = find_sites(model)
    shares = []
    for image in images:
        with recording(sites) as calls:
            sv.features(model, image)
        for (call,) in calls.values():
            rows = torch.linspace(0, call.q.shape[-2] - 1, 256).long()
            weights = attention_weights(
                call.q, call.k, call.v, call.rule, scale=call.scale, attn_mask=call.attn_mask, queries=rows
            )
            shares.append((weights > 0).float().mean().item())
    return sum(shares) / len(shares)


def soft_labels(masks: list[Tensor], classes: int, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Per patch, the share of its pixels in each class, and the share that counts (is not void)."""
    one_hot = (F.one_hot(m.clamp_max(classes), classes + 1)[..., :classes].permute(2, 0, 1) for m in masks)
    shares = torch.stack([F.adaptive_avg_pool2d(each.float(), grid) for each in one_hot])  # (B, K, h, w)
    return shares, shares.sum(1)


def probe(
    train: Tensor, val: Tensor, train_masks: list[Tensor], val_masks: list[Tensor], classes: int, seed: int
) -> float:
    """BN + linear on patch tokens (4096 patches a step, 1500 steps, AdamW), mIoU at the masks' own resolution."""
    torch.manual_seed(seed)
    labels, weight = soft_labels(train_masks, classes, (train.shape[2], train.shape[3]))
    tokens, labels = train.permute(0, 2, 3, 1).flatten(0, 2), labels.permute(0, 2, 3, 1).flatten(0, 2)
    counts = weight.flatten() > 0
    tokens, labels = tokens[counts], labels[counts]
    head = nn.Sequential(nn.BatchNorm1d(tokens.shape[1]), nn.Linear(tokens.shape[1], classes))
    steps = 1500
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        pick = torch.randint(len(tokens), (4096,))
        loss = -(labels[pick] * head(tokens[pick].float()).log_softmax(1)).sum() / labels[pick].sum()
        optimizer.zero_grad(), loss.backward(), optimizer.step(), schedule.step()
    head.eval()
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    with torch.inference_mode():
        for features, mask in zip(val, val_masks, strict=True):
            grid = head(features.flatten(1).t().float()).t().unflatten(1, features.shape[1:])  # (K, h, w)
            logits = F.interpolate(grid[None], size=mask.shape, mode="bilinear", align_corners=False)
            seen = mask < classes
            pairs = mask[seen] * classes + logits.argmax(1)[0][seen]
            confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
    hit = confusion.diag().double()
    return (hit / (confusion.sum(0) + confusion.sum(1) - hit)).nanmean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder with images/{train,val} and masks/{train,val}")
    parser.add_argument("--model", default="dinov2-small")
    parser.add_argument("--out", type=Path, required=True, help="rows that it holds are kept")
    parser.add_argument("--size", type=int, nargs=2, default=(364, 476), help="height and width in pixels")
    parser.add_argument("--classes", type=int, default=11, help="indices from here on are void")
    parser.add_argument("--photos", type=int, default=12, help="photos to calibrate on, spread over the training split")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapted", type=Path, help="what sparse_student.py wrote: scored in place of the bounds")
    parser.add_argument("--bounds", type=float, nargs="*", default=(0.24, 0.15))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train, train_masks = read_split(args.root, "train", tuple(args.size))
    val, val_masks = read_split(args.root, "val", tuple(args.size))
    model = sv.load_model(args.model)
    swaps: dict[str, dict | None] = {"softmax": None}
    fit = train[torch.linspace(0, len(train) - 1, args.photos).long()]
    fit_started = time.perf_counter()
    if args.adapted is None:
        free = sv.calibrate_swap(model, fit)
        fit_seconds = time.perf_counter() - fit_started
        for bound in args.bounds:
            name = f"entmax-1.5, calibrated, support <= {bound:g}"
            swaps[name] = {"scale": sv.calibrate_swap(model, fit, max_support=bound)}
        swaps |= {"entmax-1.5, calibrated": {"scale": free}, "entmax-1.5": {}}
    else:
        fit_seconds = 0.0
        start, end = (sv.Calibration.load(args.adapted / name) for name in ("start", "final/calibration"))
        sharper = replace(end, factors={name: SHARPER * factor for name, factor in end.factors.items()})
        swaps |= {
            "entmax-1.5, calibrated, then adapted": {"scale": end},
            f"entmax-1.5, factors x {SHARPER}, calibrated, then adapted": {"scale": sharper},
            "entmax-1.5, calibrated": {"scale": start},
        }
    rows: list[dict] = json.loads(args.out.read_text())["rows"] if args.out.is_file() else []
    record = {
        "question": "mIoU of a linear probe on frozen features, softmax against entmax in every layer",
        "model": args.model,
        "data": args.root.name,
        "size": list(args.size),
        "photos": args.photos,
        "seconds_to_calibrate": round(fit_seconds, 1),
        "machine": machine(),
    }
    untouched = model
    for name, settings in swaps.items():
        if any(row["attention"] == name for row in rows):
            continue  # of a run that was stopped
        model = sv.load_model(args.adapted / "final") if name.endswith("adapted") else untouched
        swap = None if settings is None else sv.swap_attention(model, "entmax", 1.5, layers=None, **settings)
        maps, support = (extract(model, train), extract(model, val)), measured_support(model, val[::25])
        if swap is not None:
            swap.restore()
        scores = [probe(*maps, train_masks, val_masks, args.classes, seed) for seed in range(args.seeds)]
        rows.append({"attention": name, "support": support, "miou": float(np.mean(scores)), "miou_per_seed": scores})
        record["rows"] = rows
        write(args.out, record)  # after every row: a run that is stopped keeps what it has
        print(f"{name:45s} support {support:.3f}  mIoU {np.mean(scores):.4f} ± {np.std(scores):.4f}", flush=True)


if __name__ == "__main__":
    main()
