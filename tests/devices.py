"""Where tests compute. Data and references stay on the host; what goes to a cache or store goes through here.

The CUDA backend computes in float16 and bfloat16 on blocks of 64 tokens. Tests of anything else skip on "cuda" by
asking `require`; test_cuda_binding.py asserts that the backend refuses it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridkv
from hybridkv import _core

FINEST_DTYPE = {"cpu": "float32", "cuda": "float16"}
SUPPORTED_PATHS = [path for path, supported in hybridkv.cpu_paths().items() if supported]
# Query columns that the backend judges a record for together (docs/transitions.md); None = all of a row.
TILE_COLUMNS: dict[str, int | None] = {"cpu": None, "cuda": 8}


def cuda_missing() -> str:
    """Why there is no CUDA device to test on, "" if there is one."""
    count, reason = next((count, reason) for name, count, reason in _core.devices() if name == "cuda")
    if not count:
        return reason
    return "" if torch.cuda.is_available() else "tests on CUDA need a torch that was built with it"


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(bool(cuda_missing()), reason=f"no CUDA: {cuda_missing()}"))
DEVICES = ["cpu", CUDA]


def require(device: str, *, dtype: Any = "bfloat16", block_size: int = 64) -> None:
    """Skip the test if the device's backend does not compute this."""
    if device == "cuda" and (str(dtype).endswith("float32") or block_size != 64):
        pytest.skip("the CUDA backend computes float16 and bfloat16 on blocks of 64 tokens")


def to_device(x: Any, device: str) -> Any:
    """A tensor where the cache is; what is no tensor stays as it is."""
    return torch.as_tensor(x).to(device) if hasattr(x, "__dlpack__") else x


def to_host(x: Any) -> torch.Tensor:
    """A tensor, whatever its kind, as a torch tensor on the host."""
    return torch.as_tensor(x).cpu()


def attend(device: str, step: Any, layer: int, *tensors: Any, **options: Any) -> Any:
    """`Step.attend` or `Store.attend` on tensors of the host: they go to the device, and what comes out comes back."""
    placed = {name: to_device(x, device) for name, x in options.items()}
    result = step.attend(layer, *(to_device(x, device) for x in tensors), **placed)
    for name in {"out", "lse", "mass"} & options.keys():
        options[name].copy_(placed[name])
    return tuple(to_host(x) for x in result) if isinstance(result, tuple) else to_host(result)
