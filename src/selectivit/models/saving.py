"""A trained model to a folder that `load_model` reads, whatever library the model is of."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

from torch import nn

DINOV2_KEY = "selectivit_positions"  # of config.json: the position table is resized as DINOv2's authors do


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> str:
    """Write weights as safetensors, and the configuration that makes the model anew.

    Args:
        model: on any device. Swaps and wrappers do not matter: the weights and their names stay the host's.
        folder: made if it is not there.

    Returns:
        How the folder is read again, in words for a model card.

    Raises:
        OSError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> save_model(nn.Linear(2, 2), tempfile.mkdtemp())
        'model.safetensors holds the state dict of torch.nn.modules.linear.Linear: build that model and load it'
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    of_timm = any(base.__module__.startswith("timm.models.") for base in type(model).__mro__)
    if of_timm and hasattr(model, "pretrained_cfg"):  # only timm's own builder notes what the model is made of
        _save_timm(model, path)
        return "selectivit.load_model(FOLDER)"
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(path)  # pyright: ignore[reportCallIssue]
        return "selectivit.load_model(FOLDER)"
    from safetensors.torch import save_model as save_tensors

    save_tensors(model, str(path / "model.safetensors"))
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    (path / "config.json").write_text(json.dumps({"class": kind}, indent=2) + "\n", encoding="utf-8")
    return f"model.safetensors holds the state dict of {kind}: build that model and load it"


def _save_timm(model: nn.Module, path: Path) -> None:
    from selectivit.models.dinov2 import DINOv2

    timm_models = importlib.import_module("timm.models")
    extra = {DINOV2_KEY: "dinov2"} if isinstance(model, DINOv2) else {}
    timm_models.save_for_hf(model, str(path), model_config=extra, safe_serialization=True)
