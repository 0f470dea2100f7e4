"""The structs of csrc/problem.h, field by field."""

from __future__ import annotations

import ctypes
from typing import ClassVar

ABI = 1

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Attention(ctypes.Structure):
    """One attention: inputs, outputs, strides in elements."""

    _fields_: ClassVar = [
        *((name, _pointer) for name in ("q", "k", "v", "mask", "scale_rows", "out", "tau_out", "saved")),
        *((f"{name}_stride", _long * 3) for name in "qkv"),
        ("mask_stride", _long * 4),
        ("scale_stride", _long * 3),
        *((name, _long) for name in ("batch", "heads", "n", "m", "d", "e", "saved_bytes")),
        ("scale", _float),
        ("alpha", _float),
        ("mask_kind", _int),
        ("screen", _int),
        ("threads", _int),
    ]


class AttentionGradients(ctypes.Structure):
    """The gradient that comes in and those that go out."""

    _fields_: ClassVar = [
        ("grad", _pointer),
        ("grad_stride", _long * 3),
        *((name, _pointer) for name in ("dq", "dk", "dv")),
    ]


class Rows(ctypes.Structure):
    """Rows of scores."""

    _fields_: ClassVar = [
        *((name, _pointer) for name in ("scores", "p", "tau_out")),
        *((name, _long) for name in ("rows", "n", "stride")),
        ("alpha", _float),
        ("threads", _int),
    ]
