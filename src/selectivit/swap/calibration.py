"""What a calibration holds, saved as safetensors, with a JSON file for people beside it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

TENSORS_FILE, RECORD_FILE = "calibration.safetensors", "calibration.json"
RECORD_KEY = "calibration"  # of the safetensors file's metadata


@dataclass(frozen=True)
class Calibration:
    """Factors for `swap_attention(scale=…)`, with what they were fitted on and how well they fit.

    Args:
        factors: by attention module's name, (heads,).
        support: by name, (heads,): share of the keys with non-zero weight on the fitting images.
        error: by name, (heads,): squared distance to softmax's outputs after the layer's output projection, over the
            variance of the layer's output; 0 is a perfect match.
        alpha: entmax's α that the factors are for; 2 is sparsemax.
        scores: the score source that they are for.
        fitted_on: what is written beside them: model class, images and their sizes, bound, price of support.
        fitted_for: the `fingerprint` of the model; a swap of another refuses the factors. None is not checked.
    """

    factors: Mapping[str, Tensor]
    support: Mapping[str, Tensor]
    error: Mapping[str, Tensor]
    alpha: float
    scores: str
    fitted_on: Mapping[str, Any]
    fitted_for: Mapping[str, Any] | None = None

    def mean_support(self) -> float:
        """Share of non-zero weights over all layers and heads."""
        return torch.cat(list(self.support.values())).mean().item()

    def save(self, folder: str | Path) -> None:
        """Write calibration.safetensors, which holds all, and calibration.json for people to read, into a folder.

        Each is written at once or not at all. The JSON names the SHA-256 of the other, so that one that a crash left
        beside newer tensors is known.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        kinds = {"factors": self.factors, "support": self.support, "error": self.error}
        tensors = {f"{kind}/{name}": t.contiguous() for kind, part in kinds.items() for name, t in part.items()}
        fitted_for = None if self.fitted_for is None else dict(self.fitted_for)
        record = {
            "alpha": self.alpha,
            "scores": self.scores,
            "fitted_on": dict(self.fitted_on),
            "fitted_for": fitted_for,
        }
        content = save(tensors, {"format": "pt", RECORD_KEY: json.dumps(record)})
        readable = {**record, "tensors_sha256": hashlib.sha256(content).hexdigest()}
        _write(target / TENSORS_FILE, content)
        _write(target / RECORD_FILE, (json.dumps(readable, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file does not hold a calibration, or the two are of different ones.
        """
        source = Path(folder)
        for name in (TENSORS_FILE, RECORD_FILE):
            if not (source / name).is_file():
                raise FileNotFoundError(f"no calibration in {source}: {name} is missing; Calibration.save writes both")
        try:
            content = (source / TENSORS_FILE).read_bytes()
            record = _record(source / TENSORS_FILE)
            parts: dict[str, dict[str, Tensor]] = {"factors": {}, "support": {}, "error": {}}
            for key, tensor in load(content).items():
                kind, _, name = key.partition("/")
                parts[kind][name] = tensor
            found = cls(**parts, **record)
            beside = json.loads((source / RECORD_FILE).read_text())
            digest = beside.pop("tensors_sha256")
        except Exception as error:
            raise ValueError(f"{source} does not hold a calibration that can be read: {error}") from error
        if digest != hashlib.sha256(content).hexdigest() or beside != record:
            raise ValueError(
                f"{RECORD_FILE} and {TENSORS_FILE} in {source} are not of one calibration: a save was cut short, or "
                "one was changed; fit and save again"
            )
        return found


def _record(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if RECORD_KEY not in metadata:
        raise ValueError(f"{path.name} has no {RECORD_KEY!r} in its metadata")
    return json.loads(metadata[RECORD_KEY])


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
