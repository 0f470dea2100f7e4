"""The portable kernel as an Arm processor would run it: compiled with setup.py's flags, emulated by qemu."""

from __future__ import annotations

import math
import runpy
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import selectivit as sv
from selectivit.ops.reference import attention_reference, entmax_reference

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the C++ sources"),
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR) and LIBRARIES.is_dir()),
        reason=f"needs {COMPILER} and {EMULATOR}",
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    build = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
    to = tmp_path_factory.mktemp("arm") / "driver"
    sources = [ROOT / "csrc" / f"{name}.cpp" for name in ("entry", "scratch", "kernel_portable")]
    command = [COMPILER, *build["FLAGS"], *build["OPENMP"], "-I", ROOT / "csrc", "-o", to]
    subprocess.run([*command, *sources, ROOT / "tests/ops/kernel_driver.cpp"], check=True)
    return to


def run(program, header, alpha, scale, tensors):
    problem, results = program.with_name("problem"), program.with_name("results")
    problem.write_bytes(struct.pack("<8q2f", *header, alpha, scale) + b"".join(t.numpy().tobytes() for t in tensors))
    subprocess.run([EMULATOR, "-L", LIBRARIES, program, problem, results], check=True)
    return torch.frombuffer(bytearray(results.read_bytes()), dtype=torch.float32)


def attend(program, q, k, v, *, alpha, mask=None, grad=None, threads=1):
    """Outputs and, with `grad`, the gradients of q, k and v, each (H, …)."""
    (heads, n, d), (m, e) = q.shape, v.shape[1:]
    q, k, v = (F.pad(t, (0, -t.shape[-1] % 16)) for t in (q, k, v))
    wide, tensors = v.shape[-1], [q, k, v]
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    tensors += [] if mask is None else [mask]
    tensors += [] if grad is None else [F.pad(grad, (0, wide - e))]
    header = heads, n, m, q.shape[-1], wide, kind, grad is not None, threads
    found = run(program, header, alpha, d**-0.5, [t.contiguous() for t in tensors])
    shapes = [(n, wide, e)] + ([] if grad is None else [(n, q.shape[-1], d), (m, q.shape[-1], d), (m, wide, e)])
    parts = found.split([heads * rows * width for rows, width, _ in shapes])
    return [t.view(heads, rows, -1)[..., :kept] for t, (rows, _, kept) in zip(parts, shapes, strict=True)]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("alpha", (1.05, 1.2, 1.37, 1.5, 2.0))
@pytest.mark.parametrize("width", (0.03, 1.0, 8.0))
@pytest.mark.parametrize(("n", "m", "d", "e"), ((1, 1, 16, 16), (37, 301, 64, 48), (130, 65, 24, 3), (5, 600, 256, 96)))
def test_outputs(program, n, m, d, e, width, alpha):
    q, k, v = draw(2, n, d) * width, draw(2, m, d, seed=1), draw(2, m, e, seed=2)
    (out,) = attend(program, q, k, v, alpha=alpha)
    expected = attention_reference(q, k, v, alpha=alpha)
    assert (out - expected).norm() <= 1e-5 * expected.norm() * max(1.0, width / 5)


@pytest.mark.parametrize("alpha", (1.2, 1.37, 1.5, 1.75))
@pytest.mark.parametrize("masked", (None, "bool", "additive"))
@pytest.mark.parametrize("threads", (1, 2))
def test_gradients(program, alpha, masked, threads):
    tensors = draw(2, 141, 24), draw(2, 203, 24, seed=1), draw(2, 203, 33, seed=2)
    grad = draw(2, 141, 33, seed=3)
    mask = {None: None, "bool": draw(141, 203) > -0.5, "additive": draw(141, 203)}[masked]
    wide = [t.double().requires_grad_() for t in tensors]
    out = sv.entmax_attention(*wide, alpha=alpha, attn_mask=mask)
    expected = [out, *torch.autograd.grad(out, wide, grad.double())]
    found = attend(program, *tensors, alpha=alpha, mask=mask, grad=grad, threads=threads)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 5e-5 * b.norm()


def test_rows_at_the_edge(program):
    q, k, v = draw(1, 20, 16), draw(1, 40, 16, seed=1), draw(1, 40, 16, seed=2)
    mask = draw(20, 40, seed=3)
    mask[1] = -math.inf
    mask[2, 5], mask[3, 6] = math.nan, math.inf
    (out,) = attend(program, q, k, v, alpha=1.5, mask=mask)
    assert (out[0, 1] == 0).all() and out[0, 2:4].isnan().all() and out[0, 4:].isfinite().all()


def test_nan_in_a_key_is_declined(program):
    k = draw(1, 40, 16)
    k[0, 7, 3] = math.nan
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
        attend(program, draw(1, 20, 16), k, k, alpha=1.5)


@pytest.mark.parametrize("alpha", (1.05, 1.37, 1.5, 2.0))
@pytest.mark.parametrize("n", (1, 197, 900))
def test_rows_of_scores(program, alpha, n):
    scores = draw(7, n) * 3
    scores[0, : n // 2] = -math.inf
    p = run(program, (0, 7, n, 0, 0, 0, 0, 1), alpha, 1.0, [scores]).view(7, n)
    assert (p - entmax_reference(scores, alpha)).abs().sum(-1).max() <= 2e-5
