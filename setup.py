"""Build of hybridkv._core. Everything else about the package is in pyproject.toml.

Environment:
    HYBRIDKV_WERROR=1          treat compiler warnings as errors
    HYBRIDKV_SANITIZE=NAMES    build with -fsanitize=NAMES, for example address,undefined
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
IS_X86_64 = platform.machine().lower() in ("x86_64", "amd64")

COMPILE_ARGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
AVX2_ARGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_ARGS = [f"-mavx512{name}" for name in ("f", "bw", "vl", "dq", "vbmi", "vbmi2", "vnni", "bf16")]


def isa_args(source: Path) -> list[str]:
    """Flags of the one instruction set that a file is written for; the rest runs on any machine."""
    if source.name.startswith("cpu_avx512"):
        return AVX2_ARGS + AVX512_ARGS
    if source.name.startswith("cpu_avx2"):
        return AVX2_ARGS
    return []


def core_sources() -> list[str]:
    """Sources of the C core and the binding; without x86-64 only the reference path is there."""
    paths = sorted([*ROOT.glob("csrc/*.c"), *ROOT.glob("csrc/python/*.c")])
    return [str(path.relative_to(ROOT)) for path in paths if IS_X86_64 or not isa_args(path)]


def extra_args() -> list[str]:
    """Compile flags that the environment asks for."""
    args = []
    if os.environ.get("HYBRIDKV_WERROR") == "1":
        args += ["-Wall", "-Wextra", "-Werror"]
    if sanitizers := os.environ.get("HYBRIDKV_SANITIZE"):
        return [*args, f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g"]
    return [*args, "-g0"]


class BuildExt(build_ext):
    """Compiles the files of an extension in parallel, each with the flags of its instruction set.

    A CUDA backend, hybridkv/_cuda.so, is to be built by a method of this class beside build_extension: nvcc objects
    of cuda/*.cu, linked on their own, so that hybridkv._core never depends on them.
    """

    def build_extension(self, ext: Extension) -> None:
        import numpy  # only needed to build, and not by commands such as sdist

        ext.include_dirs.append(numpy.get_include())
        sources = [Path(source) for source in ext.sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ext.extra_objects = list(pool.map(lambda source: self.compile_source(ext, source), sources))
        ext.depends = [*ext.depends, *ext.extra_objects]  # link again when one of them is new
        ext.sources = []
        super().build_extension(ext)
        ext.sources = [str(source) for source in sources]

    def compile_source(self, ext: Extension, source: Path) -> str:
        """Compile one file if anything it may include is newer than its object; returns the object."""
        target = Path(self.build_temp, source).with_suffix(".o")
        newest = max(Path(path).stat().st_mtime for path in [source, *ext.depends])
        if self.force or not target.exists() or target.stat().st_mtime < newest:
            self.compiler.compile(
                [str(source)],
                output_dir=self.build_temp,
                include_dirs=ext.include_dirs,
                extra_postargs=[*ext.extra_compile_args, *isa_args(source)],
            )
        return str(target)


setup(
    ext_modules=[
        Extension(
            "hybridkv._core",
            sources=core_sources(),
            depends=[str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.h")] + ["setup.py"],
            include_dirs=["csrc"],
            extra_compile_args=COMPILE_ARGS + extra_args(),
            extra_link_args=["-pthread", *(arg for arg in extra_args() if arg.startswith("-fsanitize"))],
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
