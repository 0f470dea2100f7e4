"""Where a distillation step's time goes, on the CPU: data, teacher, student, backward pass, optimiser.

    python benchmarks/distill_step.py PHOTOS

Seconds of processor time, the median of some steps, so that what else the machine does counts little. Prints JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time

import torch

from selectivit.data.photos import open_photos
from selectivit.data.training_images import Sample, TrainingImages, collate
from selectivit.models.weights import load_model
from selectivit.train.losses import LossWeights, distillation_losses
from selectivit.train.optimizers import MuonAdamW, gradients_finite
from selectivit.train.pair import Pair
from selectivit.train.students import build_student

BATCH, STEPS, CORES = 32, 3, 40
PARTS = ("data", "teacher", "student", "loss", "backward", "optimiser")


def step(pair: Pair, images: TrainingImages, optimizer: MuonAdamW, number: int, size: int) -> list[float]:
    times = [time.process_time()]
    batch = collate([images[Sample(number * BATCH + i, size)] for i in range(BATCH)])
    times.append(time.process_time())
    with torch.autocast("cpu", torch.bfloat16):
        teacher = pair.teach(batch.images)
        times.append(time.process_time())
        student = pair.study(batch.images, CORES)
        times.append(time.process_time())
        loss = distillation_losses(student, teacher, LossWeights())["loss"]
    times.append(time.process_time())
    loss.backward()
    times.append(time.process_time())
    gradients_finite(pair.parameters())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.process_time())
    return [end - start for start, end in itertools.pairwise(times)]


def main() -> None:
    torch.set_num_threads(1)
    teacher = load_model("dinov2-small")
    pair = Pair(build_student("veca_tiny_patch14", teacher, seed=0), teacher, sizes=[112, 224], grid="refuse")
    images = TrainingImages(open_photos(sys.argv[1:])[0], seed=0)
    optimizer, found = MuonAdamW(pair, lr=1e-4), {}
    for size in (112, 224):
        rows = [step(pair, images, optimizer, number, size) for number in range(STEPS + 1)][1:]
        seconds = {part: round(statistics.median(row[i] for row in rows), 3) for i, part in enumerate(PARTS)}
        found[f"{size} px"] = {**seconds, "photos_per_second": round(BATCH / sum(list(seconds.values())[1:]), 1)}
    print(json.dumps({"torch": torch.__version__, "batch": BATCH, "cores": CORES, "threads": 1, **found}, indent=1))


if __name__ == "__main__":
    main()
