"""The compiled CPU library: found beside this file, loaded once through ctypes, chosen per call.

The library has a C interface and knows nothing of torch, so that building it needs a C++ compiler alone. It is loaded
after torch and shares torch's OpenMP threads. What it does not cover goes to the pure-PyTorch path: `supports`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

from .structs import ABI, Attention, AttentionGradients, Rows

LEAST_ALPHA = 1.05  # below, u^(1/(α−1)) magnifies float32's rounding beyond the accuracy promised
LARGEST_WIDTH = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DECLINED, NO_MEMORY = 1, 2

_from_environment = os.environ.get("SELECTIVIT_CPU_KERNEL")
_inside_using: ContextVar[str | None] = ContextVar("selectivit_cpu_kernel", default=None)
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True  # the OpenMP team stayed behind with the parent; a parallel region would wait for it for ever


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _choice() -> str | None:
    return _inside_using.get() or _from_environment


def status() -> str:
    """Say which compiled kernel serves, or why none does.

    Returns:
        One line for `selectivit doctor`.

    Example:
        >>> with using("off"):
        ...     status()
        'switched off: the pure-PyTorch path serves'
    """
    if _choice() == "off":
        return "switched off: the pure-PyTorch path serves"
    library, why = _load()
    if library is None:
        return f"none ({why}): the pure-PyTorch path serves"
    threads = "threads shared with torch" if library.selectivit_has_threads() else "one thread: built without OpenMP"
    which, screen = _chosen(library)
    return f"{names()[which]}{' without the 16-bit screen' if not screen else ''}, {threads}"


def available() -> bool:
    """Whether a compiled library is loaded and not switched off."""
    return _choice() != "off" and _load()[0] is not None


def names() -> tuple[str, ...]:
    """The kernels this processor can run, fastest first; empty without a library."""
    library = _load()[0]
    if library is None:
        return ()
    return tuple(library.selectivit_kernel_name(i).decode() for i in range(library.selectivit_kernels()))


@contextlib.contextmanager
def using(kernel: str) -> Iterator[None]:
    """Choose the CPU kernel inside the block, for tests and measurements; also $SELECTIVIT_CPU_KERNEL.

    Args:
        kernel: "off" for pure PyTorch, or a name out of `names()`; with " float32" behind it, no 16-bit screen.

    Yields:
        Nothing.

    Raises:
        ValueError: no such kernel on this machine.
    """
    if kernel != "off" and kernel.removesuffix(" float32") not in names():
        raise ValueError(f"no CPU kernel {kernel!r} here: use 'off' or one of {', '.join(names()) or 'none'}")
    token = _inside_using.set(kernel)
    try:
        yield
    finally:
        _inside_using.reset(token)


def supports(q: Tensor, k: Tensor, v: Tensor, alpha_rows: Tensor | None, alpha: float) -> bool:
    """Whether the library computes this attention: on CPU, one α within [1.05, 2], heads of width 256 or less."""
    return (
        q.device.type == "cpu"
        and q.dtype in DTYPES
        and alpha_rows is None
        and LEAST_ALPHA <= alpha <= 2
        and max(q.shape[-1], v.shape[-1]) <= LARGEST_WIDTH
        and k.shape[-2] < 2**31 - 64
        and min(*q.shape, *k.shape, *v.shape) > 0
        and available()
    )


def saved_bytes(q: Tensor, m: int) -> int:
    """Room for the survivors of every row, as the library lays it out (saved.h): a function of the shapes alone."""
    heads = q.numel() // (q.shape[-2] * q.shape[-1])
    rows = _unit_rows(q.shape[-2])
    units = (q.shape[-2] + rows - 1) // rows
    part = 2 if m <= 512 else 4 if m <= 2048 else 8
    share, least = (m + part - 1) // part, m if m < 48 else 48
    capacity = share if share > least else least
    return heads * units * (((rows + 1) * 8 + rows * capacity * 8 + 63) // 64 * 64)


def _unit_rows(n: int) -> int:
    pieces = (n + 127) // 128
    rows = (n + pieces - 1) // pieces
    return (rows + 15) // 16 * 16


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    saved: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Run the forward pass.

    Args:
        q: (…, N, D), as `supports` says.
        k: (…, M, D).
        v: (…, M, E).
        attn_mask: bool or floating, expanded to (…, N, M).
        scale_rows: (…, N, 1) or None.
        alpha: in [1.05, 2].
        scale: factor on q·k where there are no scale_rows.
        saved: uint8 of `saved_bytes`, filled with the survivors; None where no backward pass follows.

    Returns:
        The output (…, N, E) and τ (…, N, 1); None where q or k hold NaN or infinity: the other path has the policy.
    """
    call = _Call(q, k, v, attn_mask, scale_rows, alpha, scale, saved)
    out = torch.empty(*call.lead, call.n, call.e, dtype=torch.float32)
    tau_out = torch.empty(*call.lead, call.n, 1, dtype=torch.float32)
    call.problem.out, call.problem.tau_out = out.data_ptr(), tau_out.data_ptr()
    library, which = call.library, call.which
    code = library.selectivit_forward(ctypes.byref(call.problem), which)
    if not _done(code):
        return None
    return out[..., : v.shape[-1]].to(q.dtype).contiguous(), tau_out


def attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
    saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Run the backward pass over the saved survivors; rows without are searched again.

    Returns:
        Gradients of q, k and v in float32; None as in `attention`.
    """
    call = _Call(q, k, v, attn_mask, scale_rows, alpha, scale, saved if saved.numel() else None)
    g = _rows(grad, call.lead)
    dq, dk, dv = (
        torch.empty(*call.lead, rows, width, dtype=torch.float32)
        for rows, width in ((call.n, call.d), (call.m, call.d), (call.m, call.e))
    )
    gradients = AttentionGradients(g.data_ptr(), _strides(g, 3), dq.data_ptr(), dk.data_ptr(), dv.data_ptr())
    code = call.library.selectivit_backward(ctypes.byref(call.problem), ctypes.byref(gradients), call.which)
    if not _done(code):
        return None
    d = q.shape[-1]
    return dq[..., :d].contiguous(), dk[..., :d].contiguous(), dv[..., : v.shape[-1]].contiguous()


def supports_rows(scores: Tensor, alpha: float) -> bool:
    """Whether the library normalises these rows: on CPU, not float64, α within [1.05, 2]."""
    on_cpu = scores.device.type == "cpu" and scores.dtype in DTYPES
    return on_cpu and LEAST_ALPHA <= alpha <= 2 and scores.shape[-1] < 2**31 - 64 and available()


def entmax_rows(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Normalise rows.

    Args:
        scores: (R, N) float32, R and N ≥ 1.
        alpha: in [1.05, 2].

    Returns:
        p (R, N) and τ (R, 1).
    """
    library, which, _ = _resolved()
    if scores.stride(-1) != 1:
        scores = scores.contiguous()
    p, tau_out = torch.empty(scores.shape), torch.empty(scores.shape[0], 1)
    rows, n = scores.shape
    call = Rows(scores.data_ptr(), p.data_ptr(), tau_out.data_ptr(), rows, n, scores.stride(0), alpha, _threads())
    _done(library.selectivit_entmax_rows(ctypes.byref(call), which))
    return p, tau_out


class _Call:
    """The C side's view of one attention, and the tensors that keep its memory alive."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        scale_rows: Tensor | None,
        alpha: float,
        scale: float,
        saved: Tensor | None,
    ) -> None:
        self.library, self.which, screen = _resolved()
        self.lead = q.shape[:-2]
        self.q, self.k, self.v = (_rows(t, self.lead) for t in (q, k, v))
        self.mask = None if attn_mask is None else _mask(attn_mask)
        self.scales = None if scale_rows is None else _four_dims(scale_rows.float())
        batch, heads, self.n, self.d = self.q.shape
        self.m, self.e = self.v.shape[-2:]
        self.problem = Attention(
            q=self.q.data_ptr(),
            k=self.k.data_ptr(),
            v=self.v.data_ptr(),
            mask=None if self.mask is None else self.mask.data_ptr(),
            scale_rows=None if self.scales is None else self.scales.data_ptr(),
            saved=None if saved is None else saved.data_ptr(),
            saved_bytes=0 if saved is None else saved.numel(),
            q_stride=_strides(self.q, 3),
            k_stride=_strides(self.k, 3),
            v_stride=_strides(self.v, 3),
            mask_stride=(ctypes.c_int64 * 4)() if self.mask is None else _strides(self.mask, 4),
            scale_stride=(ctypes.c_int64 * 3)() if self.scales is None else _strides(self.scales, 3),
            batch=batch,
            heads=heads,
            n=self.n,
            m=self.m,
            d=self.d,
            e=self.e,
            scale=scale,
            alpha=alpha,
            mask_kind=0 if self.mask is None else 1 if self.mask.dtype == torch.bool else 2,
            screen=screen,
            threads=_threads(),
        )


def _strides(t: Tensor, dims: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * dims)(*t.stride()[:dims])


def _four_dims(t: Tensor) -> Tensor:
    """(B, H, …): further leading dims folded into B, missing ones added."""
    while t.ndim < 4:
        t = t.unsqueeze(0)
    return t if t.ndim == 4 else t.flatten(0, -4)


def _rows(t: Tensor, lead: torch.Size) -> Tensor:
    """Float32, four dims, the last one contiguous and a multiple of 16 wide (by zeros, which change nothing)."""
    t = t if t.dtype == torch.float32 else t.float()
    t = _four_dims(t)
    if t.shape[-1] % 16:
        return torch.nn.functional.pad(t, (0, -t.shape[-1] % 16))
    return t if t.stride(-1) == 1 else t.contiguous()


def _mask(mask: Tensor) -> Tensor:
    """Bool or float32, four dims; what was broadcast stays broadcast through the conversion."""
    shape, head = mask.shape, max(0, mask.ndim - 3)
    small = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    if small.dtype not in (torch.bool, torch.float32):
        small = small.float()
    if small.shape[-1] > 1 and small.stride(-1) != 1:
        small = small.contiguous()
    small = small.expand(*shape[:head], *small.shape[head:])  # the dims that are folded into one, and those alone
    folded = _four_dims(small)
    return folded.expand(folded.shape[0], *(1,) * (3 - len(shape[head:])), *shape[head:])


def _threads() -> int:
    return 1 if _forked else torch.get_num_threads()


def _done(code: int) -> bool:
    if code == NO_MEMORY:
        raise MemoryError("entmax's CPU kernel could not allocate its tiles; use fewer threads or shorter sequences")
    return code != DECLINED


def _resolved() -> tuple[ctypes.CDLL, int, bool]:
    library, why = _load()
    if library is None:
        raise RuntimeError(f"no compiled CPU kernel: {why}")
    return library, *_chosen(library)


def _chosen(library: ctypes.CDLL) -> tuple[int, bool]:
    choice = _choice()
    if not choice:
        return 0, True
    kernel = choice.removesuffix(" float32")
    if kernel not in names():
        raise ValueError(f"SELECTIVIT_CPU_KERNEL is {choice!r}: use 'off' or one of {', '.join(names())}")
    return names().index(kernel), kernel == choice


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and, where there is none, the reason."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    path = Path(__file__).with_name(f"libselectivit_cpu{suffix}")
    if not path.exists():
        return None, "not built: installed without a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path.name} does not load: {error}"
    library.selectivit_kernel_name.restype = ctypes.c_char_p
    library.selectivit_saved_bytes.restype = ctypes.c_int64
    library.selectivit_saved_bytes.argtypes = [ctypes.c_int64] * 3
    if library.selectivit_abi() != ABI:
        return None, f"{path.name} is of another version: install again"
    return library, ""
