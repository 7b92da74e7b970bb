"""hybridkv: a hybrid key/value cache for transformers.

The newest tokens of every sequence stay in the model's dtype; older blocks are quantised once into records that can be
read at three precisions. Attention over both is one softmax.

`Cache` manages sequences and memory; `hybridkv.hf` puts it under transformers; `Store` is for builders of engines.
"""

from __future__ import annotations

from ._core import (
    ArgumentError,
    BusyError,
    CacheFullError,
    ConfigError,
    DeviceError,
    DtypeError,
    Error,
    NoDeviceError,
    OutOfMemoryError,
    StaleHandleError,
    StepError,
    __version__,
    cpu_path,
    get_num_threads,
    set_num_threads,
)
from ._core import cpu_paths as _cpu_paths
from ._core import devices as _devices
from .cache import Cache, CacheStats, Sequence, Step
from .config import ConfigWarning, HybridConfig
from .records import record_decode, record_encode, record_layout
from .store import Store

__all__ = [
    "ArgumentError",
    "BusyError",
    "Cache",
    "CacheFullError",
    "CacheStats",
    "ConfigError",
    "ConfigWarning",
    "DeviceError",
    "DtypeError",
    "Error",
    "HybridConfig",
    "NoDeviceError",
    "OutOfMemoryError",
    "Sequence",
    "StaleHandleError",
    "Step",
    "StepError",
    "Store",
    "__version__",
    "cpu_path",
    "cpu_paths",
    "devices",
    "get_num_threads",
    "record_decode",
    "record_encode",
    "record_layout",
    "set_num_threads",
]


def cpu_paths() -> dict[str, bool]:
    """The CPU code paths in ascending order of preference, and whether this machine can run them."""
    return dict(_cpu_paths())


def devices() -> dict[str, int]:
    """How many devices there are of each kind, ``{"cpu": 1, "cuda": 0}``; the command ``hybridkv info`` says why."""
    return {name: count for name, count, _ in _devices()}
