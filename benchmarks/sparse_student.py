"""Adapt a frozen model to sparse attention: every layer on entmax-1.5 at a small support, taught by its softmax self.

    python benchmarks/sparse_student.py PHOTOS… --out FOLDER --max-support 0.045 --steps 400

First a calibration (`calibrate_swap`) with that bound on the mean share of keys with non-zero weight, then a short
self-distillation of weights and of one factor per head. `calibrated_probe.py --adapted FOLDER/final` scores it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import selectivit as sv
from selectivit.cli.training_progress import training_progress
from selectivit.data.photos import open_photos
from selectivit.data.training_images import centre_crops
from selectivit.train.distill import distill
from selectivit.train.schedule import Mix, Schedule, Stage
from selectivit.train.settings import DistillSettings, Running
from selectivit.train.tokens import normalise

CALIBRATED_ON, CROP = 12, 364


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="dinov2-small")
    parser.add_argument("--max-support", type=float, default=0.045)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--size", type=int, default=224, help="side of the training crops, pixels")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--views", type=int, default=8)
    parser.add_argument("--teacher-cache", type=Path)
    given = parser.parse_args()
    found, _ = open_photos(given.photos)
    spread = range(0, len(found), max(1, len(found) // CALIBRATED_ON))
    teacher, student = sv.load_model(given.model), sv.load_model(given.model)
    expected = sv.preprocessing(student)
    crops, _ = centre_crops(found, spread, CROP, CALIBRATED_ON)
    images = normalise(torch.stack(crops), expected.mean, expected.std)
    calibration = sv.calibrate_swap(student, images, max_support=given.max_support)
    print(f"calibrated at a support of {calibration.mean_support():.3f}", flush=True)
    calibration.save(given.out / "start")
    sv.swap_attention(student, "entmax", 1.5, layers=None, scale=calibration)
    stage = Stage((Mix(given.steps, {given.size: 1.0}),), lr=given.lr, min_lr=given.lr / 50, warmup=given.steps // 20)
    settings = DistillSettings(
        Schedule((stage,)), batch_size=16, optimizer="adamw", views=given.views, learn_scale=True, validate_every=100
    )
    running = Running(teacher_cache=given.teacher_cache, checkpoint_every=50)
    with training_progress(shown=True) as tell:
        result = distill(student, teacher, given.photos, given.out, settings, running, tell=tell)
    print(result.final, result.validation)


if __name__ == "__main__":
    main()
