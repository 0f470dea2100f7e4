"""What the benchmarks share: interleaved timing in one process, and the record of where it ran."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import selectivit as sv


def interleaved(candidates: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each candidate, all of them in every round, so that a slow moment of the machine meets them all."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "median_s": statistics.median(times),
            "quartiles_s": statistics.quantiles(times, n=4)[::2] if len(times) > 1 else times * 2,
            "rounds": rounds,
        }
        for name, times in seconds.items()
    }


def machine() -> dict[str, Any]:
    """Processor, threads and versions."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "selectivit": version("selectivit"),
        "date": date.today().isoformat(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def photo_batch(model: nn.Module, photos: list[Path], size: int) -> Tensor:
    """Photos squeezed to size x size and normalised as the model expects: (B, 3, size, size)."""
    prepared = sv.preprocessing(model)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (prepared.mean, prepared.std))
    pictures = [np.array(Image.open(photo).convert("RGB").resize((size, size))) for photo in photos]
    return torch.stack([(torch.from_numpy(picture).permute(2, 0, 1) / 255 - mean) / std for picture in pictures])


def write(out: Path, record: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {out}")
