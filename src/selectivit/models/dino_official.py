"""The public checkpoints of DINO: bare backbones, and training checkpoints that hold student and teacher."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from selectivit.models.cache import WeightsError
from selectivit.models.checkpoint import read_tensors

HEAD_DIM = 64
WHICH = ("teacher", "student")
CONTAINERS = ("state_dict", "model")
PREFIXES = ("module.", "_orig_mod.", "backbone.")
HEAD = re.compile(r"(head|projection_head)\.")
TENSOR = re.compile(
    r"cls_token|pos_embed|patch_embed\.proj\.(weight|bias)|norm\.(weight|bias)|"
    r"blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])\.(weight|bias)"
)


def read_dino(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any], which: str = "teacher", num_heads: int | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a backbone of DINO's public code; projection heads are left out.

    Args:
        checkpoint: a file, or a state dict.
        which: "teacher" or "student", where there are both.
        num_heads: where heads are not 64 wide.

    Returns:
        The arguments of `DinoVitConfig`, and the tensors by timm's names, which are the authors'.

    Raises:
        ValueError: tensors of another architecture, or a width that is no multiple of 64 without num_heads.
        WeightsError: a file that cannot be read.
    """
    if which not in WHICH:
        raise ValueError(f"expected which to be one of {', '.join(WHICH)}, got {which!r}")
    state: Any = checkpoint
    if isinstance(checkpoint, (str, os.PathLike)):
        # The authors' training checkpoints keep the options of their command line: plain values in a Namespace.
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = read_tensors(checkpoint)
    if not isinstance(state, Mapping):
        raise WeightsError(f"expected a state dict in {checkpoint}, it holds a {type(state).__name__}")
    tensors = _backbone(_bare(state, which))
    return _arguments(tensors, num_heads), tensors


def _bare(state: Mapping[str, Any], which: str) -> dict[str, Any]:
    """The state dict itself, out of a training checkpoint and without the prefixes of wrappers."""
    for name in (which, *CONTAINERS):
        if isinstance(state.get(name), Mapping):
            return _bare(state[name], which)
    named = dict(state)
    for prefix in PREFIXES * 2:  # in any order
        if any(str(name).startswith(prefix) for name in named):
            named = {str(name).removeprefix(prefix): tensor for name, tensor in named.items()}
    return named


def _backbone(state: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in state.items() if not HEAD.match(name)}
    unknown = [name for name, value in tensors.items() if not TENSOR.fullmatch(name) or not isinstance(value, Tensor)]
    if unknown:
        raise ValueError(
            f"expected the tensors of DINO's ViT, got {len(unknown)} that it does not have "
            f"({', '.join(unknown[:4])}): is this a ViT of DINO's public code?"
        )
    return tensors


def _arguments(tensors: Mapping[str, Tensor], num_heads: int | None) -> dict[str, Any]:
    """The model's shape, read off its tensors."""
    needed = {"patch_embed.proj.weight": 4, "pos_embed": 3, "cls_token": 3, "blocks.0.attn.qkv.weight": 2}
    missing = [name for name, dims in needed.items() if name not in tensors or tensors[name].ndim != dims]
    if missing:
        raise ValueError(f"expected a ViT of DINO's public code, it lacks {', '.join(missing)}")
    dim, _, patch_size, _ = tensors["patch_embed.proj.weight"].shape
    side = math.isqrt(tensors["pos_embed"].shape[1] - 1)
    if side**2 + 1 != tensors["pos_embed"].shape[1]:
        raise ValueError(f"expected positions of a square grid, got {tensors['pos_embed'].shape[1] - 1} of patches")
    if num_heads is None:
        if dim % HEAD_DIM:
            raise ValueError(f"expected heads {HEAD_DIM} wide, which do not divide dim {dim}: give num_heads")
        num_heads = dim // HEAD_DIM
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    shape = {"dim": dim, "depth": depth, "num_heads": num_heads}
    return {**shape, "patch_size": patch_size, "image_size": side * patch_size}
