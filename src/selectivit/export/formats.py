"""From a program of torch.export to the bytes of a file."""

from __future__ import annotations

import importlib
import io
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from selectivit.export.describe import KEY

LARGEST = 2**31 - 2**20  # protobuf, in which ONNX is written, holds 2 GiB
NEEDED = ("onnx", "onnxscript", "onnxruntime")


class ExportError(ValueError):
    """A model that a format cannot hold; nothing was written."""

    @classmethod
    def of(cls, error: Exception, model: str, format: str, dynamic: bool) -> ExportError:
        """Say which operator or line stood in the way, and what to try.

        Args:
            error: what was raised, with what caused it.
            model: the tower's class.
            format: in words.
            dynamic: whether sizes were free.

        Returns:
            The error, to be raised.
        """
        chain: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            chain.append(str(cause))
            cause = cause.__cause__ or cause.__context__
        text = "\n".join(chain)
        lacking = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)', overload='([^']+)'\)>", text)
        first = " ".join(next((part for part in reversed(chain) if part.strip()), type(error).__name__).split())[:300]
        what = f"it has no operator for {lacking[1]} ({lacking[2]})" if lacking else first
        advice = "try format='torch'" if lacking else "try dynamic=False" if dynamic else "try another model or layer"
        if lacking and dynamic:
            advice += ", or dynamic=False, where sizes that are known leave less to compute"
        return cls(f"{model} cannot be exported by {format}: {what}; {advice}")


def torch_bytes(program: torch.export.ExportedProgram, about: dict[str, Any]) -> bytes:
    """A .pt2 file.

    Args:
        program: to write.
        about: its metadata.

    Returns:
        The file's bytes; `torch.export.load` reads them.
    """
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={f"{KEY}.json": json.dumps(about)})
    return buffer.getvalue()


def onnx_bytes(
    program: torch.export.ExportedProgram,
    about: dict[str, Any],
    inputs: list[str],
    outputs: list[str],
    model: str,
    dynamic: bool,
) -> bytes:
    """An .onnx file.

    Args:
        program: to translate.
        about: its metadata.
        inputs: their names in order.
        outputs: their names in order.
        model: the tower's class, for errors.
        dynamic: whether sizes are free.

    Returns:
        The file's bytes.

    Raises:
        ExportError: an operator that ONNX does not have, or more than 2 GiB.
    """
    large = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    if large > LARGEST:
        raise ExportError(f"{model} has {large / 2**30:.1f} GiB of weights, an ONNX file holds 2: use format='torch'")
    try:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning, UserWarning):  # of torch's and onnxscript's own code
                warnings.filterwarnings("ignore", category=kind, module=r"(torch|onnxscript|onnx_ir|copyreg)\b")
            found: Any = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=inputs, output_names=outputs
            )
    except Exception as error:
        raise ExportError.of(error, model, "ONNX", dynamic) from error
    proto = found.model_proto
    _name_dims(proto.graph, about)
    proto.metadata_props.add(key=KEY, value=json.dumps(about))
    return proto.SerializeToString()


def _name_dims(graph: Any, about: dict[str, Any]) -> None:
    """Give the free dims of inputs and outputs the words that the metadata use, in place of the tracer's symbols."""
    del graph.value_info[:]  # what the tracer noted about tensors in between, in its own symbols
    dims = {name: held["dims"] for name, held in about["inputs"].items()} | about["outputs"]
    for value in (*graph.input, *graph.output):
        for dim, word in zip(value.type.tensor_type.shape.dim, dims[value.name], strict=True):
            if not dim.HasField("dim_value"):
                dim.dim_param = word


def _need_onnx() -> None:
    for package in NEEDED:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise ImportError(f"ONNX needs {package}, which is missing: pip install 'selectivit[export]'") from error


FORMATS: dict[str, Callable[[], None]] = {"onnx": _need_onnx, "torch": lambda: None}
"""Name -> a function that raises an ImportError where what the format needs is missing."""
