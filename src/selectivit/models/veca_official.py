"""The public checkpoints of VECA: their names of tensors, and ours."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from selectivit.models.cache import WeightsError
from selectivit.models.checkpoint import read_tensors

HEAD_DIM = 64
WRAPPERS = ("module.", "_orig_mod.")  # data parallel's and torch.compile's
CONTAINERS = ("model", "state_dict", "student")

RENAMED = (
    (r"patch_embed\.proj\.(weight|bias)", r"patch_embed.\1"),
    (r"query_token_chunks\.(\d+)", r"bank.token_chunks.\1"),
    (r"qcoord_chunks\.(\d+)", r"bank.coord_chunks.\1"),
    (r"pos_linears\.(\d+)\.(weight|bias)", r"bank.coord_heads.\1.\2"),
    (r"pos_alpha", r"bank.coord_steps"),
    (r"blocks\.(\d+)\.(norm_attn|norm_ffn)\.(weight|bias)", r"blocks.\1.\2.\3"),
    (r"blocks\.(\d+)\.attn\.([qkv])_proj\.(weight|bias)", r"blocks.\1.attn.\2.\3"),
    (r"blocks\.(\d+)\.attn\.out_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (r"blocks\.(\d+)\.(fc1|fc2)\.(weight|bias)", r"blocks.\1.ffn.\2.\3"),
    (r"final_norm\.(weight|bias)", r"norm.\1"),
    (r"output_proj\.(weight|bias)", r"output_proj.\1"),
)


def read_official(
    checkpoint: str | os.PathLike[str] | Mapping[str, Tensor], num_heads: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a public checkpoint.

    Args:
        checkpoint: a file, or a state dict.
        num_heads: None where heads are 64 wide.

    Returns:
        The arguments of `VecaConfig`, and the tensors under our names.

    Raises:
        ValueError: tensors of another architecture, or a width that is no multiple of 64 without num_heads.
        WeightsError: a file that cannot be read.
    """
    state: Any = checkpoint
    if isinstance(checkpoint, (str, os.PathLike)):
        state = read_tensors(checkpoint)
    if not isinstance(state, Mapping):
        raise WeightsError(f"expected a state dict in {checkpoint}, it holds a {type(state).__name__}")
    state = _bare(state)
    tensors = _renamed(state)
    arguments = _arguments(tensors, num_heads)
    for layer in range(arguments["depth"]):
        for part in ("weight", "bias"):
            rows = [tensors.pop(f"blocks.{layer}.attn.{name}.{part}", None) for name in "qkv"]
            if any(row is None for row in rows):
                raise ValueError(f"expected q_proj, k_proj and v_proj with weight and bias in block {layer}")
            tensors[f"blocks.{layer}.attn.qkv.{part}"] = torch.cat([row for row in rows if row is not None])
    return arguments, tensors


def _bare(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict itself, out of a training checkpoint and without the prefixes of wrappers."""
    for name in CONTAINERS:
        if isinstance(state.get(name), Mapping):
            return _bare(state[name])
    for prefix in WRAPPERS:
        if state and all(str(name).startswith(prefix) for name in state):
            return _bare({name.removeprefix(prefix): tensor for name, tensor in state.items()})
    return dict(state)


def _renamed(state: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors, unknown = {}, []
    for name, tensor in state.items():
        ours = [re.sub(theirs, to, str(name)) for theirs, to in RENAMED if re.fullmatch(theirs, str(name))]
        if ours and isinstance(tensor, Tensor):
            chunk = re.match(r"bank\.(token|coord)_chunks", ours[0])
            tensors[ours[0]] = tensor.squeeze(0) if chunk and tensor.ndim == 3 else tensor
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"expected the tensors of VECA's public code, got {len(unknown)} that it does not have "
            f"({', '.join(map(str, unknown[:4]))}): is this a checkpoint of VECA?"
        )
    return tensors


def _arguments(tensors: Mapping[str, Tensor], num_heads: int | None) -> dict[str, Any]:
    """The model's shape, read off its tensors."""
    needed = ("patch_embed.weight", "blocks.0.ffn.fc2.weight", "bank.token_chunks.0", "bank.coord_chunks.0")
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(f"expected a checkpoint of VECA, it lacks what we call {', '.join(missing)}")
    for name, dims in zip(needed, (4, 2, 2, 2), strict=True):
        if tensors[name].ndim != dims:
            raise ValueError(f"expected what we call {name} with {dims} dims, got {tuple(tensors[name].shape)}")
    dim, _, patch_size, _ = tensors["patch_embed.weight"].shape
    if num_heads is None:
        if dim % HEAD_DIM:
            raise ValueError(f"expected heads {HEAD_DIM} wide, which do not divide dim {dim}: give num_heads")
        num_heads = dim // HEAD_DIM
    depths = [int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")]
    chunks = [tensor for name, tensor in tensors.items() if name.startswith("bank.token_chunks.")]
    output = tensors.get("output_proj.weight")
    return {
        "dim": dim,
        "depth": 1 + max(depths),
        "num_heads": num_heads,
        "hidden_dim": tensors["blocks.0.ffn.fc2.weight"].shape[1],
        "num_cores": sum(len(chunk) for chunk in chunks),
        "patch_size": patch_size,
        "out_dim": None if output is None else output.shape[0],
    }
