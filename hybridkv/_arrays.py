"""Outputs: arrays of the caller's kind, torch where the caller uses torch, NumPy elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from . import _core
from ._errors import made

if TYPE_CHECKING:
    Framework = Literal["numpy", "torch"]


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
    return "torch" if dtype == "bfloat16" or (torch is not None and isinstance(tensor, torch.Tensor)) else "numpy"


def empty(framework: str, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array on the CPU, not initialised."""
    if framework == "numpy" and dtype != "bfloat16":
        return np.empty(shape, dtype)
    if framework == "torch":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype))
    if framework == "numpy":
        raise made(_core.ArgumentError, "framework", "NumPy has no bfloat16; use torch")
    raise made(_core.ArgumentError, "framework", f'expected "numpy" or "torch", got {framework!r}')
