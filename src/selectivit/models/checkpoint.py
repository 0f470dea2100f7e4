"""Our own models on disk: a folder with model.safetensors and config.json."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from selectivit.models.cache import WeightsError, move_into_place

LIBRARY = "selectivit"
WEIGHTS, CONFIG = "model.safetensors", "config.json"

Model = TypeVar("Model", bound=nn.Module)


def write_model(model: nn.Module, folder: str | os.PathLike[str], kind: str, arguments: Mapping[str, Any]) -> None:
    """Write a model's tensors and the arguments that build it; each file appears whole or not at all.

    The configuration stands in the weights file too, so that files of two different checkpoints are told apart.

    Args:
        model: on any device.
        folder: made if it is not there.
        kind: the model's family, such as "veca".
        arguments: of its constructor, as JSON can hold them.
    """
    from safetensors.torch import save_file

    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"library": LIBRARY, "model": kind, **arguments}, indent=2) + "\n"
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=path) as scratch:
        weights, config = Path(scratch) / WEIGHTS, Path(scratch) / CONFIG
        tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, weights, metadata={"format": "pt", "config": text})
        config.write_text(text, encoding="utf-8")
        shutil.copymode(config, weights)  # safetensors would leave it to its writer alone
        move_into_place(weights, path / WEIGHTS)
        move_into_place(config, path / CONFIG)


def read_model(folder: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_model` wrote.

    Args:
        folder: holds both files.
        kind: the family that is expected.

    Returns:
        The constructor's arguments, and the tensors.

    Raises:
        WeightsError: a file that is missing or damaged, another family, or files of two different checkpoints.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(folder).expanduser()
    config = read_config(path)
    if config.pop("library", None) != LIBRARY or config.get("model") != kind:
        raise WeightsError(f"expected a {kind} model of {LIBRARY} in {path}, its {CONFIG} describes another one")
    del config["model"]
    if not (path / WEIGHTS).is_file():
        raise WeightsError(f"expected {WEIGHTS} beside {CONFIG} in {path}, there is none: copy both files")
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            written = json.loads((file.metadata() or {}).get("config", "null"))
            state = {name: file.get_tensor(name).clone() for name in file.keys()}
    except (SafetensorError, ValueError) as error:
        raise WeightsError(f"{path / WEIGHTS} is damaged ({error}): copy or save it again") from error
    if written is not None and written != {"library": LIBRARY, "model": kind, **config}:
        raise WeightsError(f"{CONFIG} and {WEIGHTS} in {path} belong to different checkpoints: copy both files again")
    return config, state


def read_tensors(checkpoint: str | os.PathLike[str]) -> Any:
    """What a file of tensors holds, read without running code from it.

    Args:
        checkpoint: a .safetensors file, or a .pt or .pth file of plain tensors.

    Returns:
        Mostly a state dict, or a dict that holds some.

    Raises:
        WeightsError: no such file, a damaged one, or a pickle of more than plain tensors.
    """
    path = Path(checkpoint).expanduser()
    if not path.is_file():
        what = "a folder, expected a file in it" if path.is_dir() else "no file"
        raise WeightsError(f"{path} is {what}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"cannot read {path}: its pickle is damaged or holds more than plain tensors, which could run code when "
            "read; save the state dict alone, as safetensors, where you trust it"
        ) from error
    except Exception as error:  # safetensors and torch raise many kinds for a damaged file
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise WeightsError(f"cannot read {path}, it is damaged or of another format ({told})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Args:
        folder: of a model.

    Returns:
        Its keys.

    Raises:
        WeightsError: there is none, or it is no JSON object.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"expected a folder with {CONFIG} and {WEIGHTS}, there is no {path}") from None
    except ValueError as error:
        raise WeightsError(f"{path} is no JSON ({error}): copy or save it again") from error
    if not isinstance(config, dict):
        raise WeightsError(f"expected an object in {path}, got {type(config).__name__}")
    return config


def fill(model: Model, state: Mapping[str, Tensor], what: str) -> Model:
    """Give a model its tensors, all of them and no other.

    Args:
        model: on the meta device or any other; its parameters become the tensors themselves.
        state: by name.
        what: names the source in the error.

    Returns:
        The model.

    Raises:
        WeightsError: tensors that are missing, too many, or of another shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": [
            f"{name} {found[name]} in place of {expected[name]}"
            for name in sorted(expected.keys() & found.keys())
            if expected[name] != found[name]
        ],
    }
    told = [f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in problems.items() if names]
    if told:
        raise WeightsError(f"the tensors of {what} do not fit {type(model).__name__}: {'; '.join(told)}")
    model.load_state_dict(dict(state), assign=True)
    return model
