"""The CPU kernel for AMX: chosen by what the processor has; with its tile instructions in plain C++, exact."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import selectivit as sv
from selectivit.ops.kernels import cpu

ROOT = Path(__file__).parents[2]
PACKAGE = Path(sv.__file__).parent
X86_LINUX = platform.machine() == "x86_64" and sys.platform.startswith("linux")
pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no compiled CPU kernel: {cpu.status()}")


@pytest.mark.skipif(not X86_LINUX, reason="the AMX kernel is built for Linux on x86-64")
def test_amx_is_offered_only_where_the_processor_has_it():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    offered = "AMX" in cpu.names()
    assert offered <= {"amx_tile", "amx_bf16", "avx512f"}.issubset(flags)  # Linux may still refuse it
    assert not offered or cpu.names()[0] == "AMX"


@pytest.mark.skipif(not X86_LINUX or not shutil.which("objdump"), reason="needs objdump, on Linux on x86-64")
def test_the_library_holds_the_tile_instructions():
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", PACKAGE / "ops/kernels/libselectivit_cpu.so"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    words = set(code.split())
    if "tdpbf16ps" not in words:
        pytest.skip("built by a compiler without AMX")
    assert {"ldtilecfg", "tilezero", "tileloadd", "tilestored", "tilerelease"} <= words


@pytest.mark.slow
@pytest.mark.timeout(900)  # a build, and the tests of the kernels
@pytest.mark.skipif(not X86_LINUX or "AVX-512" not in cpu.names(), reason="the emulation stands on AVX-512")
@pytest.mark.skipif(not (ROOT / "csrc").is_dir() or not shutil.which("g++"), reason="needs the C++ sources and g++")
def test_emulated_tiles_pass_every_test_of_the_kernels(tmp_path):
    package, built = tmp_path / "package", tmp_path / "built"
    shutil.copytree(PACKAGE, package / "selectivit", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build = ["setup.py", "build_ext", "--build-lib", str(package), "--build-temp", str(built)]
    found = run(build, SELECTIVIT_EMULATE_AMX="1")
    assert found.returncode == 0, found.stdout + found.stderr
    there = {"PYTHONPATH": str(package), "SELECTIVIT_CPU_KERNEL": ""}
    names = run(["-c", "from selectivit.ops.kernels import cpu; print(cpu.names()[0], cpu.__file__)"], **there)
    assert names.stdout.split() == ["AMX", "(emulated)", str(package / "selectivit/ops/kernels/cpu.py")], names.stderr
    of_kernels = ["tests/ops/test_kernel_attention.py", "tests/ops/test_kernel_threads.py"]
    tests = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not AVX and not portable", *of_kernels], **there
    )
    assert tests.returncode == 0, tests.stdout + tests.stderr


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
