"""What a calibration holds, saved as safetensors and JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

TENSORS_FILE, RECORD_FILE = "calibration.safetensors", "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """Factors for `swap_attention(scale=…)`, with what they were fitted on and how well they fit.

    Args:
        factors: by attention module's name, (heads,).
        support: by name, (heads,): share of the keys with non-zero weight on the fitting images.
        error: by name, (heads,): squared distance to softmax's outputs after the layer's output projection, over the
            variance of the layer's output; 0 is a perfect match.
        alpha: entmax's α that the factors are for.
        scores: the score source that they are for.
        fitted_on: what is written beside them: model class, images and their sizes, bound, price of support.
    """

    factors: Mapping[str, Tensor]
    support: Mapping[str, Tensor]
    error: Mapping[str, Tensor]
    alpha: float
    scores: str
    fitted_on: Mapping[str, Any]

    def mean_support(self) -> float:
        """Share of non-zero weights over all layers and heads."""
        return torch.cat(list(self.support.values())).mean().item()

    def save(self, folder: str | Path) -> None:
        """Write calibration.safetensors and calibration.json into a folder, each at once or not at all."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        kinds = {"factors": self.factors, "support": self.support, "error": self.error}
        tensors = {f"{kind}/{name}": t.contiguous() for kind, part in kinds.items() for name, t in part.items()}
        record = {"alpha": self.alpha, "scores": self.scores, "fitted_on": dict(self.fitted_on)}
        _write(target / TENSORS_FILE, save(tensors))
        _write(target / RECORD_FILE, (json.dumps(record, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file does not hold a calibration.
        """
        source = Path(folder)
        for name in (TENSORS_FILE, RECORD_FILE):
            if not (source / name).is_file():
                raise FileNotFoundError(f"no calibration in {source}: {name} is missing; Calibration.save writes both")
        try:
            record = json.loads((source / RECORD_FILE).read_text())
            tensors = load((source / TENSORS_FILE).read_bytes())
            parts: dict[str, dict[str, Tensor]] = {"factors": {}, "support": {}, "error": {}}
            for key, tensor in tensors.items():
                kind, _, name = key.partition("/")
                parts[kind][name] = tensor
            return cls(**parts, alpha=record["alpha"], scores=record["scores"], fitted_on=record["fitted_on"])
        except Exception as error:
            raise ValueError(f"{source} does not hold a calibration that can be read: {error}") from error


def _write(path: Path, content: bytes) -> None:
    """Write through a temporary file beside the target, so that a reader sees the old file or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
