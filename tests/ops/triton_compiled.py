"""Compile the Triton kernels to machine code without a card, as the ptxas in Triton's wheel can."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selectivit.ops.kernels import triton as host
from selectivit.ops.kernels import triton_backward, triton_forward

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


class _Recorder:
    """Stands for a kernel: notes what it is called with instead of running it."""

    def __init__(self, kernel: Any, calls: list[Any]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.calls.append((self.kernel, args, options))


def compiled(
    capability: int, dtype: torch.dtype, m: int, d: int, alpha: float, masked: bool = False
) -> dict[str, tuple[int, int]]:
    """(bytes spilled by a thread, bytes of shared memory) of every kernel that attention of this shape launches."""
    return {call[0].__name__: _compile(capability, *call) for call in _launches(dtype, m, d, alpha, masked)}


def _launches(dtype: torch.dtype, m: int, d: int, alpha: float, masked: bool) -> list[Any]:
    """What the host launches for attention that will be differentiated, with a mask and a scale for each row or not."""
    calls: list[Any] = []
    kernels = [(triton_forward, "strip_forward"), (triton_forward, "long_forward")]
    kernels += [(triton_backward, "queries_backward"), (triton_backward, "keys_backward")]
    originals = [getattr(module, name) for module, name in kernels]
    q, k, v = (torch.zeros(1, 2, m, d, dtype=dtype) for _ in range(3))
    saved = torch.zeros(host.saved_bytes(q, v), dtype=torch.uint8)
    mask = torch.ones(m, m, dtype=torch.bool).expand(1, 2, m, m) if masked else None
    scales = torch.ones(1, 2, m, 1) if masked else None
    try:
        for (module, name), kernel in zip(kernels, originals, strict=True):
            setattr(module, name, _Recorder(kernel, calls))
        host.attention(q, k, v, mask, scales, alpha, 0.125, saved)
        host.attention_gradients(q, q, k, v, mask, scales, alpha, 0.125, saved)
    finally:
        for (module, name), kernel in zip(kernels, originals, strict=True):
            setattr(module, name, kernel)
    return calls


def _compile(capability: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int]:
    chosen = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    arguments = inspect.signature(kernel.fn).bind(*args, **options).arguments
    signature, constants, attributes = {}, {}, {}
    for place, (name, value) in enumerate(arguments.items()):
        if name in options or (isinstance(value, int) and value == 1):  # as the launcher specialises strides of 1
            signature[name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
    return _stack(found.asm["cubin"]), found.metadata.shared


def _stack(binary: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", text)
    assert stack, text
    return int(stack[1])
