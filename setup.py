"""Compile the optional CPU kernel: one shared library with a C interface, each instruction set in its own file.

No torch is needed to build it. Without a C++ compiler the installation succeeds and pure PyTorch serves.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("csrc")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    # false alarms of the compiler over its own vector headers
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
X86 = platform.machine().lower() in ("x86_64", "amd64")
LINUX = sys.platform.startswith("linux")
AVX512 = ["-mavx2", "-mfma", *(f"-mavx512{x}" for x in ("f", "bw", "vl", "dq", "vnni")), "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {
    "entry": [],
    "scratch": [],
    "kernel_portable": [],
    **({"kernel_avx2": ["-mavx2", "-mfma"], "kernel_avx512": AVX512} if X86 else {}),
}
AMX = {"kernel_amx": [*AVX512, "-mamx-tile", "-mamx-bf16"]} if X86 and LINUX else {}  # where the compiler knows it
# For tests where no processor has AMX: the tile instructions in plain C++, chosen wherever AVX-512 is.
EMULATE_AMX = ["-DSELECTIVIT_EMULATE_AMX"] if os.environ.get("SELECTIVIT_EMULATE_AMX") == "1" else []
OPENMP = ["-fopenmp"] if LINUX else []


class BuildKernel(build_ext):
    """Every source with the flags of its instruction set; a failure is reported and does not stop the installation."""

    def get_ext_filename(self, fullname):
        """Name the library without a Python version: it does not depend on one."""
        suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
        *package, _ = fullname.split(".")
        return str(Path(*package, f"libselectivit_cpu{suffix}"))

    def build_extension(self, ext):
        """Compile and link, or say why not."""
        try:
            defines = ["-DSELECTIVIT_X86"] if X86 else []
            objects = self._compile_amx(ext, defines)
            if objects:
                defines.append("-DSELECTIVIT_AMX")
            for name, flags in INSTRUCTION_SETS.items():
                objects += self._compile(ext, name, [*defines, *flags])
            to = self.get_ext_fullpath(ext.name)
            self.compiler.link_shared_object(objects, to, extra_postargs=OPENMP, target_lang="c++")
        except Exception as error:
            print(f"selectivit: the CPU kernel is not built ({error}); pure PyTorch will serve", file=sys.stderr)

    def _compile(self, ext, name, flags):
        return self.compiler.compile(
            [str(SOURCES / f"{name}.cpp")],
            output_dir=self.build_temp,
            extra_postargs=[*FLAGS, *OPENMP, *EMULATE_AMX, *flags],
            depends=ext.depends,
        )

    def _compile_amx(self, ext, defines):
        """Compile the kernel for AMX; a compiler that is too old for it leaves the others."""
        try:
            return [
                o
                for name, flags in AMX.items()
                for o in self._compile(ext, name, [*defines, "-DSELECTIVIT_AMX", *flags])
            ]
        except CompileError as error:
            print(f"selectivit: the CPU kernel is built without AMX ({error})", file=sys.stderr)
            return []


class PlatformWheel(bdist_wheel):
    """The library does not touch Python's own interface: one wheel a platform serves every Python 3."""

    def get_tag(self):
        """Return the wheel's tag."""
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "selectivit.ops.kernels.cpu_library",
                sources=[str(SOURCES / f"{name}.cpp") for name in (*INSTRUCTION_SETS, *AMX)],
                depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
                optional=True,
            )
        ],
        cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
    )
