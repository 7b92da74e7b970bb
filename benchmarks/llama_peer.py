"""llama.cpp's CPU flash attention as a peer, through the ggml libraries that llama-cpp-python installs.

    with LlamaAttention("q8_0", k, v, q_heads=32, threads=2) as peer:
        out = peer(q)

One decode step: q [B, Hq, D] against k, v [B, Hkv, S, D]. The cache type is one of f16, q8_0, q4_0, as llama.cpp's
options -ctk and -ctv take it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def available() -> bool:
    """Is llama-cpp-python installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def _load() -> Any:
    """The ggml libraries with the signatures used here."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise RuntimeError("llama-cpp-python is not installed")
    folder = Path(spec.origin).parent / "lib"
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    pointer, size, integer, real = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (pointer, [_InitParams]),
        "ggml_free": (None, [pointer]),
        "ggml_new_tensor_4d": (pointer, [pointer, integer, *[ctypes.c_int64] * 4]),
        "ggml_flash_attn_ext": (pointer, [pointer, pointer, pointer, pointer, pointer, real, real, real]),
        "ggml_new_graph": (pointer, [pointer]),
        "ggml_build_forward_expand": (None, [pointer, pointer]),
        "ggml_get_data": (pointer, [pointer]),
        "ggml_nbytes": (size, [pointer]),
        "ggml_quantize_chunk": (size, [integer, pointer, pointer, *[ctypes.c_int64] * 3, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(base, name)
        function.restype, function.argtypes = result, arguments
    cpu.ggml_graph_compute_with_ctx.restype = integer
    cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, integer]
    cpu.ggml_cpu_init.restype = None
    cpu.ggml_cpu_init()
    return base, cpu


class LlamaAttention:
    """A ggml graph of one flash-attention node over a cache of the given type."""

    def __init__(self, cache_type: str, k: np.ndarray, v: np.ndarray, q_heads: int, threads: int) -> None:
        self.base, self.cpu = _load()
        self.threads = threads
        rows, kv_heads, length, dim = k.shape
        self.shape = (rows, q_heads, dim)
        n_bytes = 2 * k.size * 4 + (256 << 20)
        self.context = self.base.ggml_init(_InitParams(n_bytes, None, False))
        kind = GGML_TYPES[cache_type]
        self.q = self.base.ggml_new_tensor_4d(self.context, GGML_TYPES["f32"], dim, 1, q_heads, rows)
        keys = self.base.ggml_new_tensor_4d(self.context, kind, dim, length, kv_heads, rows)
        values = self.base.ggml_new_tensor_4d(self.context, kind, dim, length, kv_heads, rows)
        self._fill(keys, kind, k)
        self._fill(values, kind, v)
        self.out = self.base.ggml_flash_attn_ext(
            self.context, self.q, keys, values, None, 1.0 / math.sqrt(dim), 0.0, 0.0
        )
        self.graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(self.graph, self.out)

    def _fill(self, tensor: int, kind: int, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=np.float32)
        target = self.base.ggml_get_data(tensor)
        if kind == GGML_TYPES["f16"]:
            half = data.astype(np.float16)
            ctypes.memmove(target, half.ctypes.data, half.nbytes)
            return
        rows = data.size // data.shape[-1]
        self.base.ggml_quantize_chunk(kind, data.ctypes.data, target, 0, rows, data.shape[-1], None)

    def __call__(self, q: np.ndarray) -> np.ndarray:
        """Attention of q [B, Hq, D] float32; returns the same shape."""
        ctypes.memmove(
            self.base.ggml_get_data(self.q), np.ascontiguousarray(q, dtype=np.float32).ctypes.data, q.size * 4
        )
        status = self.cpu.ggml_graph_compute_with_ctx(self.context, self.graph, self.threads)
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute: status {status}")
        out = np.empty(self.shape, dtype=np.float32)
        ctypes.memmove(out.ctypes.data, self.base.ggml_get_data(self.out), out.nbytes)
        return out

    def close(self) -> None:
        """Free the graph and the cache."""
        if self.context:
            self.base.ggml_free(self.context)
            self.context = None

    def __enter__(self) -> LlamaAttention:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
