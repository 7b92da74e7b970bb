"""A GPU for tests of what the layers above the kernels do for one; where there is none, a stand-in passes for it.

The stand-in, tests/c/fake_cuda.c beside a copy of the package, computes on the CPU; its tensors are host tensors whose
capsules say that they lie on a GPU. test_cuda_binding.py builds it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridkv
from hybridkv import _core

N_DEVICES = next(count for name, count, _ in _core.devices() if name == "cuda")
IS_STAND_IN = N_DEVICES > 0 and not torch.cuda.is_available()
MEMORY = "cpu" if IS_STAND_IN else "cuda:0"
"""Where torch allocates what `shared` hands over."""
needs_device = pytest.mark.skipif(N_DEVICES == 0, reason="no CUDA; test_cuda_binding.py runs this on a stand-in")
needs_gpu = pytest.mark.skipif(N_DEVICES == 0 or IS_STAND_IN, reason="needs a GPU")


class Wrapped:
    """A producer that knows only `__dlpack__`, as libraries without the C exchange API do."""

    def __init__(self, tensor: Any, *, versioned: bool = True) -> None:
        self.tensor = tensor
        self.versioned = versioned
        self.shape = tensor.shape
        self.calls: list[dict[str, Any]] = []

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        if not self.versioned and "max_version" in kwargs:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()  # type: ignore[no-any-return]


class OnCuda(Wrapped):
    """A tensor of the host whose capsules say that it lies on a GPU."""

    def __init__(self, tensor: Any, index: int = 0, *, device_type: int = 2, versioned: bool = True) -> None:
        super().__init__(tensor, versioned=versioned)
        self.device = (device_type, index)

    def __dlpack__(self, stream: Any = None, **kwargs: Any) -> Any:
        capsule = super().__dlpack__(**kwargs)
        self.calls[-1]["stream"] = stream
        name, offset = (b"dltensor_versioned", 40) if "max_version" in kwargs else (b"dltensor", 8)
        ctypes.memmove(capsule_pointer(capsule, name) + offset, (ctypes.c_int32 * 2)(*self.device), 8)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def capsule_pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, name))


def place(tensor: torch.Tensor, index: int = 0) -> Any:
    """A tensor of the host on a GPU."""
    return OnCuda(tensor, index) if IS_STAND_IN else tensor.to(f"cuda:{index}")


def shared(tensor: torch.Tensor) -> Any:
    """A tensor in `MEMORY` as one on the first GPU, without a copy."""
    return OnCuda(tensor) if IS_STAND_IN else tensor


def host_of(tensor: Any) -> torch.Tensor:
    """What `place` and `shared` made, on the host."""
    return tensor.tensor if IS_STAND_IN else tensor.cpu()  # type: ignore[no-any-return]


class StandInGraph:
    """The graph of the stand-in."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.library = ctypes.CDLL(str(Path(hybridkv.__file__).parent / "_cuda.so"))
        self.library.fake_cuda_record(1)
        work()
        self.library.fake_cuda_record(0)

    def replay(self) -> None:
        assert self.library.fake_cuda_replay() > 0


def capture(work: Callable[[], None]) -> Any:
    """A graph of what `work` launches."""
    if IS_STAND_IN:
        return StandInGraph(work)
    gc.collect()  # caches that are freed during a capture would spoil it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
