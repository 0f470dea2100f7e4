"""Compile the optional CPU kernel: one shared library with a C interface, each instruction set in its own file.

No torch is needed to build it. Without a C++ compiler the installation succeeds and pure PyTorch serves.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

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
INSTRUCTION_SETS = {
    "entry": [],
    "scratch": [],
    "kernel_portable": [],
    **({"kernel_avx2": ["-mavx2", "-mfma"]} if X86 else {}),
    **(
        {
            "kernel_avx512": [
                *("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
                "-mprefer-vector-width=512",
            ]
        }
        if X86
        else {}
    ),
}
OPENMP = ["-fopenmp"] if sys.platform.startswith("linux") else []


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
            objects = []
            for name, flags in INSTRUCTION_SETS.items():
                arch = ["-DSELECTIVIT_X86"] if X86 else []
                objects += self.compiler.compile(
                    [str(SOURCES / f"{name}.cpp")],
                    output_dir=self.build_temp,
                    extra_postargs=[*FLAGS, *OPENMP, *arch, *flags],
                    depends=ext.depends,
                )
            to = self.get_ext_fullpath(ext.name)
            self.compiler.link_shared_object(objects, to, extra_postargs=OPENMP, target_lang="c++")
        except Exception as error:
            print(f"selectivit: the CPU kernel is not built ({error}); pure PyTorch will serve", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The library does not touch Python's own interface: one wheel a platform serves every Python 3."""

    def get_tag(self):
        """Return the wheel's tag."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "selectivit.ops.kernels.cpu_library",
            sources=[str(SOURCES / f"{name}.cpp") for name in INSTRUCTION_SETS],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)
