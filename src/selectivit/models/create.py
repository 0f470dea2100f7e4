"""`create_model`: an untrained model by its name."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from selectivit.models.cache import WeightsError
from selectivit.models.dino_vit_config import DINO_SIZES, DinoVitConfig
from selectivit.models.veca import Veca
from selectivit.models.veca_config import SIZES, VecaConfig

IMAGE_SIZES = {14: 224, 16: 256}
DINO_PATCHES = (8, 16)


def create_model(name: str, **arguments: Any) -> nn.Module:
    """Make a model with random weights, ready for training.

    Args:
        name: veca_{tiny,small,small_plus,base,large}_patch{14,16}, or dino_vit_{tiny,small,base}_patch{8,16}.
        arguments: what differs from the published size, by name: for VECA those of `VecaConfig`, such as
            num_cores=64, out_dim=768, attention="entmax15", pad=True; for DINO's ViT those of `DinoVitConfig`, such as
            attention="entmax15", registers=4, specialization="third".

    Returns:
        The model, in training mode.

    Raises:
        ValueError: an unknown name; the nearest are named. Or arguments that do not fit each other.
        TypeError: an unknown argument.
        ImportError: timm is not installed, for DINO's ViT.

    Example:
        >>> model = create_model("veca_tiny_patch16", num_cores=16)
        >>> model(torch.randn(1, 3, 64, 64), num_cores=4).cores.shape
        torch.Size([1, 4, 192])
    """
    builder = BUILDERS.get(name)
    if builder is None:
        close = difflib.get_close_matches(name, BUILDERS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(BUILDERS)}"
        raise ValueError(f"unknown model {name!r}; {hint} Pretrained models are loaded by load_model")
    return builder(arguments)


def load_folder(folder: str | os.PathLike[str], kind: Any) -> nn.Module:
    """A model of ours from the folder that its `save_pretrained` wrote.

    Args:
        folder: holds model.safetensors and config.json.
        kind: what config.json calls the model.

    Returns:
        The model, in eval mode and the dtype it was saved in.

    Raises:
        WeightsError: a kind that this version does not know, or files that cannot be read.
    """
    if kind not in KINDS:
        raise WeightsError(
            f"its config.json asks for a model {kind!r}, this version knows {', '.join(KINDS)}: a newer selectivit?"
        )
    return KINDS[kind]().from_pretrained(folder)


def _veca(config: VecaConfig, arguments: dict[str, Any]) -> Veca:
    return Veca(_with(config, arguments, "a VECA model"))


def _dino_vit(config: DinoVitConfig, arguments: dict[str, Any]) -> nn.Module:
    return _dino_kind()(_with(config, arguments, "DINO's ViT"))


def _dino_kind() -> Any:
    try:
        from selectivit.models.dino_vit import DinoViT
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ImportError("DINO's ViT needs timm, which is missing: pip install 'selectivit[timm]'") from error
    return DinoViT


def _with(config: Any, arguments: dict[str, Any], what: str) -> Any:
    known = [field.name for field in dataclasses.fields(config)]
    if unknown := [name for name in arguments if name not in known]:
        raise TypeError(f"unknown argument {unknown[0]!r}: {what} takes {', '.join(known)}")
    return dataclasses.replace(config, **arguments)


KINDS: dict[str, Callable[[], Any]] = {"veca": lambda: Veca, "dino_vit": _dino_kind}
"""What config.json calls a model -> its class, imported when it is wanted."""


BUILDERS: Mapping[str, Callable[..., nn.Module]] = {
    f"veca_{size}_patch{patch}": partial(
        _veca, dataclasses.replace(config, patch_size=patch, image_size=IMAGE_SIZES[patch])
    )
    for size, config in SIZES.items()
    for patch in IMAGE_SIZES
} | {
    f"dino_vit_{size}_patch{patch}": partial(_dino_vit, dataclasses.replace(config, patch_size=patch))
    for size, config in DINO_SIZES.items()
    for patch in DINO_PATCHES
}
