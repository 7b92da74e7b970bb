"""Build of hybridkv._core and, where nvcc is found, of hybridkv/_cuda.so. All else is in pyproject.toml.

Environment:
    HYBRIDKV_WERROR=1            treat compiler warnings as errors
    HYBRIDKV_SANITIZE=NAMES      build the C files with -fsanitize=NAMES, for example address,undefined
    HYBRIDKV_CUDA=0              build for the CPU alone, also where nvcc is found
    HYBRIDKV_CUDA_ARCHS=LIST     GPUs to build for, oldest first, for example 90a or 80;90a; the default is all that are
                                 tuned, as far as nvcc knows them
    HYBRIDKV_CUDA_DEBUG=1        let a CUDA graph stop with an error when the cache that it works on is gone
    HYBRIDKV_CUDA_SPILLS=1       go on where kernels spill registers, which otherwise stops the build
    CUDA_HOME=DIRECTORY          where the CUDA toolkit is; else /usr/local/cuda or the nvcc on PATH
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
IS_X86_64 = platform.machine().lower() in ("x86_64", "amd64")

COMPILE_ARGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
AVX2_ARGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_ARGS = [f"-mavx512{name}" for name in ("f", "bw", "vl", "dq", "vbmi", "vbmi2", "vnni", "bf16")]

CUDA_ARCHS = "80;86;89;90a;100"
CUDA_ARGS = ["-std=c++20", "-O3", "-Xfatbin", "-compress-all", "-Xptxas", "-v"]
# No exceptions, run-time types or guarded statics, so that nothing of the C++ runtime is needed.
CUDA_HOST_ARGS = ["-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"]
CUDA_C_SOURCES = ["csrc/plan.c", "csrc/status.c"]  # what the backend calls of the C core


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


def wants_werror() -> bool:
    """Whether warnings are errors."""
    return os.environ.get("HYBRIDKV_WERROR") == "1"


def extra_args() -> list[str]:
    """Compile flags that the environment asks for."""
    args = ["-Wall", "-Wextra", "-Werror"] if wants_werror() else []
    if sanitizers := os.environ.get("HYBRIDKV_SANITIZE"):
        return [*args, f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g"]
    return [*args, "-g0"]


def link_args() -> list[str]:
    """Flags of both links."""
    return ["-pthread", *(arg for arg in extra_args() if arg.startswith("-fsanitize"))]


def newest(paths: list[Path]) -> float:
    """When the youngest of these files was written."""
    return max(path.stat().st_mtime for path in paths)


def find_nvcc() -> Path | None:
    """The CUDA compiler, or None where the package is built for the CPU alone."""
    if os.environ.get("HYBRIDKV_CUDA") == "0":
        return None
    if home := os.environ.get("CUDA_HOME"):
        nvcc = Path(home, "bin", "nvcc")
        if not nvcc.exists():
            raise SystemExit(f"CUDA_HOME is {home}, but there is no {nvcc}")
        return nvcc
    default, on_path = Path("/usr/local/cuda/bin/nvcc"), shutil.which("nvcc")
    return default if default.exists() else Path(on_path) if on_path else None


def cuda_archs(nvcc: Path) -> list[str]:
    """GPUs to build for, oldest first: those asked for, or those of the default list that the compiler knows."""
    if asked := os.environ.get("HYBRIDKV_CUDA_ARCHS"):
        return asked.replace(",", ";").split(";")
    listed = subprocess.run([nvcc, "--list-gpu-code"], check=True, capture_output=True, text=True).stdout.split()
    return [arch for arch in CUDA_ARCHS.split(";") if f"sm_{arch.rstrip('a')}" in listed]


def arch_args(archs: list[str]) -> list[str]:
    """Code for each architecture, and PTX of the last one for those to come unless it is for that chip alone."""
    args = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    if archs[-1].isdigit():
        args.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    return args


def find_waits(log: str) -> list[str]:
    """What ptxas says of warpgroup products that it makes wait for each other, which they must not."""
    return [line.strip() for line in log.splitlines() if "(C7511)" in line]


def find_spills(log: str) -> list[str]:
    """Kernels that keep registers in memory, from what ptxas says of each."""
    spills, kernel = [], ""
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            kernel = f"{entry[2]} {entry[1]}"
        elif (bytes_ := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)) and int(bytes_[1]):
            spills.append(f"{kernel}: {bytes_[1]} bytes stored, {bytes_[2]} loaded")
    return spills


class CudaLibrary:
    """Builds hybridkv/_cuda.so: nvcc objects of cuda/*.cu, linked by the C compiler with the static CUDA runtime.

    Parameters
    ----------
    nvcc : the compiler
    work : directory of objects; those of other architectures have one of their own
    """

    def __init__(self, nvcc: Path, work: Path) -> None:
        archs = cuda_archs(nvcc)
        self.nvcc = nvcc
        debug = os.environ.get("HYBRIDKV_CUDA_DEBUG") == "1"
        self.work = work / f"cuda-{'-'.join(archs)}{'-debug' if debug else ''}"
        self.args = [*CUDA_ARGS, *arch_args(archs), f"--threads={len(archs)}", *(["-DHKV_DEBUG"] if debug else [])]
        host_args = [*CUDA_HOST_ARGS, *(["-Wall", "-Wextra", "-Werror"] if wants_werror() else [])]
        self.args.append(f"-Xcompiler={','.join(host_args)}")
        self.headers = [*ROOT.glob("cuda/*.cuh"), *ROOT.glob("csrc/*.h"), ROOT / "setup.py"]

    def compile(self, source: Path) -> Path:
        """The object of a file, made anew if anything it may include is newer; its .log is what ptxas said."""
        target = self.work / f"{source.stem}.o"
        log = target.with_suffix(".log")
        if not log.exists() or log.stat().st_mtime < newest([source, *self.headers]):
            self.work.mkdir(parents=True, exist_ok=True)
            command = [self.nvcc, *self.args, "-c", source, "-o", target]
            print(*command, flush=True)
            result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if result.returncode:
                raise SystemExit(f"{source.name}:\n{result.stdout}")
            log.write_text(result.stdout)
        return target

    def check_waits(self, objects: list[Path]) -> None:
        """Stop if ptxas found no registers for warpgroup products under way: where it did, results were wrong."""
        waits = [wait for path in objects for wait in find_waits(path.with_suffix(".log").read_text())]
        if waits:
            raise SystemExit("\n".join(["warpgroup products wait for each other:", *waits]))

    def check_spills(self, objects: list[Path]) -> None:
        """Stop if a kernel spills registers: it would run, at a fraction of its speed."""
        spills = [spill for path in objects for spill in find_spills(path.with_suffix(".log").read_text())]
        if not spills:
            return
        message = "\n".join(["kernels spill registers:", *spills])
        if demangler := shutil.which("c++filt"):
            message = subprocess.run([demangler], input=message, check=True, capture_output=True, text=True).stdout
        if os.environ.get("HYBRIDKV_CUDA_SPILLS") != "1":
            raise SystemExit(message)
        print(message, file=sys.stderr)

    def runtime(self) -> Path:
        """The static CUDA runtime of the compiler's toolkit."""
        home = self.nvcc.resolve().parents[1]
        places = [home / "lib64", home / "lib", *home.glob("targets/*/lib")]
        for place in places:
            if (place / "libcudart_static.a").exists():
                return place / "libcudart_static.a"
        raise SystemExit(f"no libcudart_static.a in {', '.join(map(str, places))}")

    def build(self, compiler: str, c_objects: list[Path], target: Path) -> None:
        """Compile what changed, check it, and link."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(self.compile, sorted(ROOT.glob("cuda/*.cu"))))
        self.check_spills(objects)
        self.check_waits(objects)
        inputs = [*objects, *c_objects]
        if target.exists() and target.stat().st_mtime > newest(inputs):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-shared", "-o", target, *inputs, self.runtime(), *link_args()]
        command += ["-ldl", "-lrt", "-Wl,--exclude-libs,ALL", "-Wl,-z,defs"]
        print(*command, flush=True)
        subprocess.run(command, check=True)


class BuildExt(build_ext):
    """Compiles the files of an extension in parallel, each with the flags of its instruction set.

    The CUDA backend is linked on its own, so that hybridkv._core never depends on it.
    """

    def run(self) -> None:
        super().run()
        if (nvcc := find_nvcc()) is None:
            print("hybridkv is built for the CPU alone: no nvcc, or HYBRIDKV_CUDA=0", file=sys.stderr)
            return
        c_objects = [Path(self.build_temp, source).with_suffix(".o") for source in CUDA_C_SOURCES]
        CudaLibrary(nvcc, Path(self.build_temp)).build(self.compiler.compiler_so[0], c_objects, self.cuda_target())

    def cuda_target(self) -> Path:
        """Where the library goes: beside hybridkv._core."""
        return Path(self.get_ext_fullpath("hybridkv._core")).with_name("_cuda.so")

    def get_outputs(self) -> list[str]:
        outputs = super().get_outputs()
        return [*outputs, str(self.cuda_target())] if find_nvcc() else outputs

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
        if self.force or not target.exists() or target.stat().st_mtime < newest([source, *map(Path, ext.depends)]):
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
            extra_link_args=link_args(),
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
