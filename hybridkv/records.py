"""Single records from Python: for looking into dumps, and for tests. The caches do not go through here."""

from __future__ import annotations

from typing import Any

from . import _core
from ._arrays import DLPackTensor
from .config import HybridConfig


def record_encode(config: HybridConfig, k: DLPackTensor, v: DLPackTensor) -> bytes:
    """Quantise tokens of one KV head into a record.

    Parameters
    ----------
    config : HybridConfig
        Its `quantization_bits` (not 0) and `block_size` count.
    k, v : tensor, shape ``[n, D]``
        At most `block_size` tokens in float16, bfloat16 or float32.

    Returns
    -------
    bytes
        As in ``docs/format.md``, with the header of a block that was just sealed.
    """
    return _core.record_encode(k, v, bits=config.quantization_bits, block_size=config.block_size)


def record_decode(config: HybridConfig, record: Any, head_dim: int, precision: str | None = None) -> tuple[Any, Any]:
    """The tokens of a record.

    Parameters
    ----------
    config : HybridConfig
        Its `block_size` counts.
    record : bytes-like
    head_dim : int
    precision : str, optional
        "int4", "k8v4" or "int8"; default: the best that the record holds.

    Returns
    -------
    k, v : float32 array, shape ``[n, D]``
    """
    return _core.record_decode(record, head_dim, block_size=config.block_size, precision=precision)


def record_layout(config: HybridConfig, head_dim: int, dtype: str = "float16") -> dict[str, int]:
    """Sizes and offsets in bytes of a record, and of a row page in `dtype`; names as in ``docs/format.md``."""
    return _core.record_layout(config.quantization_bits, config.block_size, head_dim, dtype)
