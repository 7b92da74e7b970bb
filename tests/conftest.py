"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from devices import CUDA, DEVICES, SUPPORTED_PATHS

import hybridkv


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every kind of device."""
    return str(request.param)


@pytest.fixture(params=[*SUPPORTED_PATHS, CUDA])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of every backend: each CPU code path of this machine, which HYBRIDKV_CPU chooses, and CUDA."""
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setenv("HYBRIDKV_CPU", request.param)
    return "cpu"


@pytest.fixture
def make_cache() -> Iterator[Callable[..., hybridkv.Cache]]:
    """Makes small caches (2 layers, 2 KV heads, D 32, float16); keywords change that. They are checked and closed."""
    caches: list[hybridkv.Cache] = []

    def make(config: hybridkv.HybridConfig | None = None, **options: Any) -> hybridkv.Cache:
        defaults = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "dtype": "float16", "max_sequences": 4}
        if "memory_bytes" not in options:
            options.setdefault("max_tokens", 1024)
        cache = hybridkv.Cache(config, **{**defaults, **options})
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.close()
