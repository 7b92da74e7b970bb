"""Who may know whom: hybridkv/ -> csrc/python/ -> csrc/ <- cuda/. And what every file must, or must not, contain."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)
C_LIBRARY = {
    "ctype.h",
    "dlfcn.h",
    "errno.h",
    "float.h",
    "immintrin.h",
    "inttypes.h",
    "limits.h",
    "math.h",
    "pthread.h",
    "sched.h",
    "signal.h",
    "stdarg.h",
    "stdatomic.h",
    "stdbool.h",
    "stddef.h",
    "stdint.h",
    "stdio.h",
    "stdlib.h",
    "string.h",
    "sys/mman.h",
    "time.h",
    "unistd.h",
}


def includes(path: Path) -> list[tuple[str, str]]:
    return INCLUDE.findall(path.read_text())


def c_includes(path: Path) -> list[tuple[str, str]]:
    """What a C compiler sees of a header that nvcc compiles too."""
    return INCLUDE.findall(re.sub(r"#ifdef __CUDACC__\n.*?#else", "", path.read_text(), flags=re.DOTALL))


def files(*patterns: str) -> list[Path]:
    found = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    assert found, f"no file matches {patterns}"
    return found


@pytest.mark.parametrize("path", files("csrc/*.[ch]"), ids=lambda path: path.name)
def test_core_needs_libc_and_its_own_headers_only(path: Path) -> None:
    for kind, name in c_includes(path):
        if kind == "<":
            assert name in C_LIBRARY, f"{path.name} includes <{name}>"
        else:
            assert (ROOT / "csrc" / name).is_file(), f"{path.name} includes {name}, which is not in csrc/"


@pytest.mark.parametrize("path", files("csrc/python/*.[ch]"), ids=lambda path: path.name)
def test_binding_is_the_only_place_of_python_and_one_file_of_numpy(path: Path) -> None:
    for kind, name in includes(path):
        if kind == "<":
            allowed = C_LIBRARY | {"Python.h"} | ({"numpy/arrayobject.h"} if path.name == "py_numpy.c" else set())
            assert name in allowed, f"{path.name} includes <{name}>"
        else:
            places = [ROOT / "csrc/python" / name, ROOT / "csrc" / name]
            assert any(place.is_file() for place in places), f"{path.name} includes {name}"


def test_cuda_knows_csrc_but_not_python() -> None:
    for path in ROOT.glob("cuda/*.*"):
        for kind, name in includes(path):
            assert "python" not in name.lower(), f"{path.name} includes {name}"
            if kind == '"':
                places = [ROOT / "cuda" / name, ROOT / "csrc" / name]
                assert any(place.is_file() for place in places), f"{path.name} includes {name}"


@pytest.mark.parametrize("path", files("hybridkv/*.py"), ids=lambda path: path.name)
def test_package_imports_torch_only_inside_functions(path: Path) -> None:
    """hybridkv.hf is for torch users; the rest must import without it, and quickly."""
    if path.name == "demo.py":
        pytest.skip("the demo is a program for transformers users and is imported by nothing")
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        assert not {name.split(".")[0] for name in names} & {"torch", "transformers"}, f"{path.name} imports {names}"


def test_file_names_are_unique_in_the_c_tree() -> None:
    names = [path.name for path in files("csrc/*.[ch]", "csrc/python/*.[ch]") + list(ROOT.glob("cuda/*.*"))]
    assert sorted(names) == sorted(set(names))


def test_core_does_not_exit_print_or_keep_state() -> None:
    """A library reports through status codes. Tables that are const are no state."""
    forbidden = re.compile(r"\b(abort|exit|_exit|printf|puts|perror)\s*\(|\bfprintf\s*\(\s*(stderr|stdout)")
    variable = re.compile(r"^static (?!const\b|inline\b)[a-z_][\w *]*(\[\w*\])?( =|;)", re.MULTILINE)
    for path in files("csrc/*.[ch]", "csrc/python/*.[ch]"):
        code = re.sub(r'/\*.*?\*/|"(\\.|[^"\\])*"', "", path.read_text(), flags=re.DOTALL)
        assert not forbidden.search(code), f"{path.name}: {forbidden.search(code)}"
        if path.parent.name == "csrc":
            variables = [match.group() for match in variable.finditer(code) if "const" not in match.group()]
            assert not variables, f"{path.name}: {variables}"


@pytest.mark.parametrize("folder", ["csrc", "cuda", "hybridkv", "tests", "benchmarks", "examples", "docs"])
def test_source_package_has_everything(folder: str) -> None:
    """MANIFEST.in lets every tracked file of these folders into the sdist; setuptools adds the package's modules."""
    manifest = (ROOT / "MANIFEST.in").read_text().splitlines()
    patterns = next(line.split()[2:] for line in manifest if line.startswith(f"recursive-include {folder} "))
    patterns += ["*.py"] if folder == "hybridkv" else []
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    for name in listed.stdout.splitlines():
        assert any(Path(name).match(pattern) for pattern in patterns), f"{name} is in no line of MANIFEST.in"


def test_versions_agree() -> None:
    header = (ROOT / "csrc/hkv.h").read_text()
    numbers = [re.search(rf"HKV_VERSION_{part} (\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(match.group(1) for match in numbers if match)
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
