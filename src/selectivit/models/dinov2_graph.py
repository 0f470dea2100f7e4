"""An exported DINOv2 (ONNX, as transformers exports it) read under timm's names."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selectivit.models.cache import WeightsError

if TYPE_CHECKING:
    from onnx import GraphProto


def state_from_graph(graph: GraphProto) -> dict[str, Tensor]:
    """Map an exported DINOv2 to timm's names.

    Biases, norms, LayerScale and the convolution are initializers under their own names. Linear weights were transposed
    and renamed by the exporter: they are found through the MatMul node that uses them. The position table was split
    into class and patches and renamed: its parts are told by their shapes.

    Args:
        graph: with `backbone.*` initializers and `/backbone/*` nodes as transformers' Dinov2Model exports them.

    Returns:
        Tensors by timm's names, query, key and value fused.

    Raises:
        WeightsError: something is missing.

    Source: DINOv2 (arXiv 2304.07193).
    """
    from onnx import numpy_helper

    tensors = {entry.name: torch.tensor(numpy_helper.to_array(entry)) for entry in graph.initializer}
    factors = {node.name: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    depth = len({name.split(".")[3] for name in tensors if name.startswith("backbone.encoder.layer.")})
    try:
        state = {
            "cls_token": tensors["backbone.embeddings.cls_token"],
            "pos_embed": _position_table(tensors),
            "norm.weight": tensors["backbone.layernorm.weight"],
            "norm.bias": tensors["backbone.layernorm.bias"],
        }
        for kind in ("weight", "bias"):
            state[f"patch_embed.proj.{kind}"] = tensors[f"backbone.embeddings.patch_embeddings.projection.{kind}"]
        for index in range(depth):
            block = _block(tensors, factors, index)
            state.update({f"blocks.{index}.{name}": tensor for name, tensor in block.items()})
    except KeyError as missing:
        raise WeightsError(f"expected the graph of an exported DINOv2, but it has no {missing}") from None
    return {name: tensor.contiguous() for name, tensor in state.items()}


def _block(tensors: dict[str, Tensor], factors: dict[str, str], index: int) -> dict[str, Tensor]:
    own, node = f"backbone.encoder.layer.{index}.", f"/backbone/encoder/layer.{index}/"

    def linear(theirs: str) -> tuple[Tensor, Tensor]:
        weight = tensors[factors[f"{node}{theirs.replace('.', '/')}/MatMul"]]  # (in, out)
        return weight.T, tensors[f"{own}{theirs}.bias"]

    block: dict[str, Tensor] = {}
    parts = [linear(f"attention.attention.{part}") for part in ("query", "key", "value")]
    block["attn.qkv.weight"] = torch.cat([weight for weight, _ in parts])  # (3 C, C)
    block["attn.qkv.bias"] = torch.cat([bias for _, bias in parts])
    for ours, theirs in (("attn.proj", "attention.output.dense"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
        block[f"{ours}.weight"], block[f"{ours}.bias"] = linear(theirs)
    for number in (1, 2):
        block[f"norm{number}.weight"] = tensors[f"{own}norm{number}.weight"]
        block[f"norm{number}.bias"] = tensors[f"{own}norm{number}.bias"]
        block[f"ls{number}.gamma"] = tensors[f"{own}layer_scale{number}.lambda1"]
    return block


def _position_table(tensors: dict[str, Tensor]) -> Tensor:
    """(1, 1 + N, C): the two unnamed initializers of three axes, one token long and N tokens long."""
    unnamed = [tensor for name, tensor in tensors.items() if name.startswith("onnx::") and tensor.ndim == 3]
    parts = sorted(unnamed, key=lambda tensor: tensor.shape[1])
    if len(parts) != 2 or parts[0].shape[1] != 1:
        raise KeyError("position table of the class token and of the patches")
    return torch.cat(parts, dim=1)


def fingerprint(state: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values, whatever the order and the file format.

    Args:
        state: tensors by name.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> a, b = torch.zeros(2), torch.ones(1)
        >>> fingerprint({"a": a, "b": b}) == fingerprint({"b": b, "a": a}) != fingerprint({"a": a, "b": -b})
        True
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
