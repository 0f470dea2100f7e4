"""The Triton kernels: checked in Triton's interpreter by a process of its own, compiled without a card, on a card."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import selectivit as sv
from selectivit.ops.kernels import triton
from selectivit.ops.reference import attention_reference

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2]) if find_spec(package) else (0, 0)


needs_interpreter = pytest.mark.skipif(
    release("triton") < (3, 7) and release("numpy") >= (2, 4),
    reason="the interpreter of Triton 3.6 and older makes numbers of arrays, which numpy 2.4 and later refuse",
)


def interpreted(*arguments: str) -> str:
    """Run the checks under pytest in Triton's interpreter, which has to be chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_checks.py")]
    run = subprocess.run(
        [*command, *arguments], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@needs_triton
@needs_interpreter
@pytest.mark.timeout(900)
def test_checks_pass_in_the_interpreter():
    passed = re.search(r"(\d+) passed", interpreted())
    assert passed and int(passed[1]) >= 70


@needs_triton
@needs_interpreter
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_larger_checks_pass_in_the_interpreter():
    assert re.search(r"7 passed", interpreted("-m", "slow"))


@needs_triton
@pytest.mark.slow
def test_the_benchmark_checks_without_a_card():
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_attention.py"), "--check-only"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.count(": right") == 12, run.stdout + run.stderr


def tensors(device: str = "cpu", dtype: torch.dtype = torch.float32, d: int = 16, m: int = 20):
    return torch.zeros(1, 2, 5, d, device=device, dtype=dtype), *(
        torch.zeros(1, 2, m, d, device=device, dtype=dtype) for _ in range(2)
    )


def test_cpu_tensors_are_not_served_unless_interpreted():
    assert not triton.supports(*tensors(), None, 1.5)
    with triton.using("interpreter"):
        assert triton.supports(*tensors(), None, 1.5)
        assert triton.status() == "in Triton's interpreter, for tests: slow"


def test_what_is_not_covered_goes_to_pytorch():
    with triton.using("interpreter"):
        assert not triton.supports(*tensors(dtype=torch.float64), None, 1.5)
        assert not triton.supports(*tensors(), None, 1.0) and not triton.supports(*tensors(), None, 2.01)
        assert triton.supports(*tensors(), None, 2.0) and triton.supports(*tensors(d=128), None, 1.001)
        assert not triton.supports(*tensors(), torch.full((1, 2, 5, 1), 1.5), 0.0)
        assert not triton.supports(*tensors(d=129), None, 1.5) and not triton.supports(*tensors(m=0), None, 1.5)


def test_choices_are_named_in_errors(monkeypatch):
    with pytest.raises(ValueError, match="no choice 'fast' of Triton kernels: use one of on, "), triton.using("fast"):
        pass
    monkeypatch.setattr(triton, "_from_environment", "yes")
    with pytest.raises(ValueError, match="SELECTIVIT_TRITON is 'yes'"):
        triton.status()


def test_status_says_why_none_serves(monkeypatch):
    if not torch.cuda.is_available():
        assert triton.status() == "none (no CUDA card): the pure-PyTorch path serves"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0) if i else (7, 5))
    monkeypatch.setattr(triton, "_missing", lambda: "")
    monkeypatch.setattr(triton, "_too_old", triton._too_old.__wrapped__)
    assert triton.status() == "serves cuda:1 (compiled when first used)"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert triton.status() == "none (cuda:0 has compute capability 7.5, below 8.0): the pure-PyTorch path serves"


def test_products_are_rounded_to_tf32_only_where_torch_may():
    before = torch.backends.cuda.matmul.fp32_precision
    assert triton._precision(torch.float32) == "ieee"
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert triton._precision(torch.float32) == "tf32" and triton._precision(torch.bfloat16) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    with triton.using("on tf32x3"):
        assert triton._precision(torch.float32) == "tf32x3"


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", (80, 90))
@pytest.mark.parametrize(
    ("dtype", "m", "d", "alpha", "masked"),
    (
        (torch.bfloat16, 197, 64, 1.5, False),
        (torch.bfloat16, 577, 64, 1.5, False),
        (torch.bfloat16, 1024, 64, 2.0, False),
        (torch.float16, 4096, 64, 1.5, False),
        (torch.bfloat16, 1370, 128, 1.5, False),
        (torch.float32, 1370, 64, 1.5, False),
        (torch.float32, 197, 128, 1.2, False),
        (torch.bfloat16, 1370, 64, 1.37, True),
        (torch.float32, 577, 64, 1.01, True),
    ),
    ids=str,
)
def test_kernels_compile_without_a_card(capability, dtype, m, d, alpha, masked):
    """To machine code that keeps its numbers in registers, within the shared memory of every card from 8.0 on."""
    from triton_compiled import compiled

    for name, (spilled, shared) in compiled(capability, dtype, m, d, alpha, masked).items():
        assert shared <= 99 * 1024, f"{name} takes {shared} bytes of shared memory"
        assert spilled <= (256 if masked else 64), f"{name} spills {spilled} bytes a thread"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("m", (197, 577, 1024, 1370, 2305, 4500))
@pytest.mark.parametrize("alpha", (1.1, 1.2, 1.5, 1.7, 2.0))
def test_outputs_and_gradients_on_a_card(dtype, m, alpha):
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 3, m, 64, generator=draw, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    assert triton.supports(q, k, v, None, alpha)
    out = sv.entmax_attention(q, k, v, alpha=alpha)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    expected = attention_reference(q.detach(), k.detach(), v.detach(), alpha=alpha)
    assert (out - expected).norm() <= near * expected.norm()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(sv.entmax_attention(*wide, alpha=alpha).square().sum(), wide)
    for a, b in zip(torch.autograd.grad(out.float().square().sum(), (q, k, v)), exact, strict=True):
        assert (a - b).norm() <= (1e-4 if dtype == torch.float32 else 2e-2) * b.norm()


@pytest.mark.gpu
def test_compiled_by_torch_on_a_card():
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", requires_grad=True) for _ in range(3))
    attend = torch.compile(sv.entmax_attention, fullgraph=True)
    torch.testing.assert_close(attend(q, k, v), sv.entmax_attention(q, k, v))
    a, b = (torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v)) for f in (attend, sv.entmax_attention))
    torch.testing.assert_close(a, b)
