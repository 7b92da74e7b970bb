"""Outputs of the caller's kind, and names of dtypes, devices and streams."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from . import _core
from ._errors import made

if TYPE_CHECKING:
    Framework = Literal["numpy", "torch", "cupy"]


class DLPackTensor(Protocol):
    """Any tensor that other libraries may look into."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


def dtype_name(dtype: Any) -> str:
    """ "bfloat16" from that string, a torch dtype or a NumPy dtype; what is no dtype comes back as its text."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, (np.dtype, type)):
        try:
            return str(np.dtype(dtype).name)
        except TypeError:
            return str(dtype)
    return str(dtype).removeprefix("torch.")


def framework_of(tensor: object, dtype: str) -> Framework:
    """The library that outputs for this input come from. NumPy has no bfloat16."""
    torch = sys.modules.get("torch")
    if dtype == "bfloat16" or (torch is not None and isinstance(tensor, torch.Tensor)):
        return "torch"
    return "cupy" if type(tensor).__module__.partition(".")[0] == "cupy" else "numpy"


def default_framework(dtype: str, device: str) -> Framework:
    """The library of arrays that have no input to go by: NumPy where it can."""
    return "numpy" if device == "cpu" and dtype != "bfloat16" else "torch"


def empty(framework: str, shape: tuple[int, ...], dtype: str, device: str) -> Any:
    """A new array, not initialised."""
    if framework == "torch":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if framework not in ("numpy", "cupy"):
        raise made(_core.ArgumentError, "framework", f'expected "numpy", "torch" or "cupy", got {framework!r}')
    if dtype == "bfloat16":
        name = "NumPy" if framework == "numpy" else "CuPy"
        raise made(_core.ArgumentError, "framework", f"{name} has no bfloat16; use torch")
    if framework == "cupy":
        import cupy

        with cupy.cuda.Device(int(device.partition(":")[2])):
            return cupy.empty(shape, dtype)
    if device != "cpu":
        rule = f"must be given: there is no array library to make one on {device}; or pass tensors of torch or cupy"
        raise made(_core.ArgumentError, "out", rule)
    return np.empty(shape, dtype)


def device_name(device: Any) -> str:
    """ "cpu" or "cuda:N" from such a string or a torch device; "cuda" is the first one. The core checks the rest."""
    return "cuda:0" if str(device) == "cuda" else str(device)


def stream_address(stream: Any, device: str) -> int:
    """Address of the CUDA stream that a call works on; 0 is the default stream, and all there is on the CPU.

    Parameters
    ----------
    stream : int, stream object or None
        An address, an object with ``__cuda_stream__`` or ``cuda_stream``; None = torch's current stream of the device
        if torch is in use, else the default stream.
    """
    if stream is None:
        torch = sys.modules.get("torch") if device != "cpu" else None
        in_use = torch is not None and torch.cuda.is_initialized()
        return torch.cuda.current_stream(device).cuda_stream if in_use else 0  # type: ignore[union-attr]
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]  # type: ignore[no-any-return]
    return getattr(stream, "cuda_stream", stream)  # type: ignore[no-any-return]
