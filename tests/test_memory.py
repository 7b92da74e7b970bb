"""Caches and stores in memory of the caller: the same results, nothing beside it touched, lifetimes, errors."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import attend, to_host
from engine import Engine

import hybridkv
from hybridkv import ArgumentError

ROOT = Path(__file__).parent.parent
GUARD, POISON = 0xA5, 0xFF
GUARD_BYTES = 4096
ENOUGH = {"cpu": 32 << 20, "cuda": 512 << 20}


class Lent:
    """n_bytes of poison between guards, from an address that is no multiple of anything."""

    def __init__(self, n_bytes: int, device: str) -> None:
        self.whole = torch.full((n_bytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
        self.memory = self.whole[GUARD_BYTES + 3 : GUARD_BYTES + 3 + n_bytes]
        self.memory.fill_(POISON)
        self.n_bytes = n_bytes

    def is_unhurt(self) -> bool:
        """Whether nothing was written outside of it."""
        end = GUARD_BYTES + 3 + self.n_bytes
        return bool((self.whole[: GUARD_BYTES + 3] == GUARD).all() and (self.whole[end:] == GUARD).all())


def make(device: str, bits: int = 8, **options: Any) -> hybridkv.Cache:
    config = hybridkv.HybridConfig(quantization_bits=bits, hot_tokens=32)
    sizes: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64, "max_sequences": 4}
    windows = [0, 100, 0]
    return hybridkv.Cache(config, dtype="float16", device=device, layer_windows=windows, **{**sizes, **options})


def live(cache: hybridkv.Cache) -> list[torch.Tensor]:
    """What a life of prompts, decode steps, a fork and a truncation answers."""
    random = torch.Generator().manual_seed(1)
    first, second = cache.add_sequence(), cache.add_sequence()
    outputs = []

    def step(sequences: list[Any], counts: list[int]) -> None:
        with cache.step(sequences, counts) as open_step:
            for layer in range(cache.num_layers):
                q, k, v = torch.randn(3, sum(counts), 2, 64, generator=random).half()
                outputs.append(attend(cache.device, open_step, layer, q, k, v))

    step([first, second], [200, 97])
    for _ in range(40):
        step([second, first], [1, 1])
    third = cache.fork(first)
    cache.truncate(second, 33)
    step([first, second, third], [3, 64, 2])
    cache.free(first)
    step([third, second], [1, 70])
    return outputs


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
def test_same_life_in_lent_memory(device: str, bits: int) -> None:
    lent = Lent(ENOUGH[device], device)
    expected = live(make(device, bits, max_tokens=2048))
    cache = make(device, bits, max_tokens=2048, memory=lent.memory)
    for ours, theirs in zip(live(cache), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert lent.is_unhurt()
    assert (lent.memory != POISON).any(), "nothing lies there"


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int64])
def test_same_life_in_an_array_of_numpy(dtype: Any) -> None:
    expected = live(make("cpu", max_tokens=2048))
    memory = np.full((64, ENOUGH["cpu"] // 64), POISON, np.uint8).view(dtype)
    for ours, theirs in zip(live(make("cpu", max_tokens=2048, memory=memory)), expected, strict=True):
        assert torch.equal(ours, theirs)


def kinds(stats: Any) -> dict[str, int]:
    names = [name for name in vars(stats) if name.endswith("_bytes") and not name.startswith(("memory", "allocated"))]
    return {name: getattr(stats, name) for name in names}


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
def test_every_byte_is_accounted_for(device: str, bits: int) -> None:
    """The same in lent memory as without, but for what alignment costs, and not more than there is."""
    lent = Lent(ENOUGH[device], device)
    plain = make(device, bits, max_tokens=2048).stats()
    stats = make(device, bits, max_tokens=2048, memory=lent.memory).stats()
    for each in (plain, stats):
        assert sum(kinds(each).values()) == each.allocated_bytes <= each.memory_bytes
    different = {"unused_bytes": 0}
    assert kinds(stats) | different == kinds(plain) | different
    assert stats.max_tokens == plain.max_tokens
    assert stats.n_hot_pages_total == plain.n_hot_pages_total
    on_host = stats.table_bytes + stats.prefix_bytes if device == "cuda" else 0
    assert stats.allocated_bytes - on_host <= lent.n_bytes


@pytest.mark.parametrize("n_bytes", [1 << 20, (1 << 20) + 77, 5 << 20, 40 << 20])
def test_memory_is_a_bound_and_is_used(device: str, n_bytes: int) -> None:
    if device == "cuda":
        n_bytes *= 64  # the scratch of a GPU alone takes some
    lent = Lent(n_bytes, device)
    cache = make(device, memory=lent.memory)
    stats = cache.stats()
    assert sum(kinds(stats).values()) == stats.allocated_bytes
    if device == "cpu":
        assert 0.5 * n_bytes < stats.allocated_bytes <= n_bytes
    else:
        assert stats.allocated_bytes > 0.5 * n_bytes
    sequence = cache.add_sequence()
    n_tokens = min(stats.max_tokens, 4096)
    k = torch.randn(n_tokens, 2, 64).half()
    with cache.step([sequence], [n_tokens]) as step:
        for layer in range(3):
            attend(device, step, layer, k, k, k)
    assert lent.is_unhurt()


def test_lower_bound_wins(device: str) -> None:
    lent = Lent(2 * ENOUGH[device], device)
    assert make(device, memory=lent.memory, max_tokens=640).stats().max_tokens < 2000
    bound = ENOUGH[device]
    stats = make(device, memory=lent.memory, memory_bytes=bound).stats()
    assert stats.allocated_bytes <= bound == stats.memory_bytes


def test_two_caches_in_one_tensor(device: str) -> None:
    lent = Lent(2 * ENOUGH[device], device)
    halves = lent.memory.chunk(2)
    expected = live(make(device, max_tokens=2048))
    caches = [make(device, max_tokens=2048, memory=half) for half in halves]
    for cache in caches:
        for ours, theirs in zip(live(cache), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert lent.is_unhurt()


def test_memory_can_be_used_again(device: str) -> None:
    lent = Lent(ENOUGH[device], device)
    expected = live(make(device, max_tokens=2048))
    for _ in range(2):
        cache = make(device, max_tokens=2048, memory=lent.memory)
        for ours, theirs in zip(live(cache), expected, strict=True):
            assert torch.equal(ours, theirs)
        cache.close()
        lent.memory.fill_(POISON)
    assert lent.is_unhurt()


def test_memory_lives_as_long_as_the_cache() -> None:
    class Memory(np.ndarray[Any, Any]):
        """An array that can be watched."""

    memory = np.zeros(16 << 20, np.uint8).view(Memory)
    watch = weakref.ref(memory)
    cache = make("cpu", memory=memory)
    del memory
    gc.collect()
    assert watch() is not None
    live(cache)
    cache.close()
    gc.collect()
    assert watch() is None

    memory = np.zeros(16 << 20, np.uint8).view(Memory)
    watch = weakref.ref(memory)
    cache = make("cpu", memory=memory)
    del memory, cache
    gc.collect()
    assert watch() is None


def test_a_view_keeps_memory_when_the_cache_is_closed(device: str) -> None:
    cache = make(device, memory=torch.full((ENOUGH[device],), POISON, dtype=torch.uint8, device=device))
    live(cache)
    view = torch.from_dlpack(cache.export_pages(0))
    before = view.cpu()
    cache.close()
    del cache
    gc.collect()
    others = [torch.zeros(ENOUGH[device], dtype=torch.uint8, device=device) for _ in range(2)]
    assert torch.equal(view.cpu(), before)
    del others


def test_memory_is_not_given_to_others_while_the_cache_lives(device: str) -> None:
    """What torch hands out next after the tensor is gone would else be the same bytes."""
    expected = live(make(device, max_tokens=2048))
    memory = torch.full((ENOUGH[device],), POISON, dtype=torch.uint8, device=device)
    address = memory.data_ptr()
    cache = make(device, max_tokens=2048, memory=memory)
    del memory
    gc.collect()
    others = [torch.full((ENOUGH[device],), GUARD, dtype=torch.uint8, device=device) for _ in range(2)]
    assert address not in [other.data_ptr() for other in others]
    for ours, theirs in zip(live(cache), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert all((other == GUARD).all() for other in others)


def test_a_view_may_outlive_the_interpreter() -> None:
    """Its consumer calls the deleter when it likes, here when the process exits."""
    code = """
import ctypes, numpy as np, hybridkv
c = hybridkv.Cache(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16", memory=np.zeros(8 << 20, np.uint8))
capsule = c.export_pages(0).__dlpack__()
api, libc, used = ctypes.pythonapi, ctypes.CDLL(None), b"used_dltensor"
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
tensor = api.PyCapsule_GetPointer(capsule, b"dltensor")
api.PyCapsule_SetName(capsule, used)
deleter = ctypes.c_void_p.from_address(tensor + 56).value  # behind DLTensor and manager_ctx
libc.__cxa_atexit.argtypes = [ctypes.c_void_p] * 3
assert libc.__cxa_atexit(deleter, tensor, None) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_refused_memory_is_let_go() -> None:
    memory = np.zeros(100, np.uint8)
    watch = weakref.ref(memory)
    with pytest.raises(ArgumentError, match="memory = 100 is too small"):
        make("cpu", memory=memory)
    del memory
    gc.collect()
    assert watch() is None


def test_bad_memory(device: str) -> None:
    memory = torch.zeros(8 << 20, dtype=torch.uint8, device=device)
    read_only = np.zeros(8 << 20, np.uint8)
    read_only.flags.writeable = False
    wrong: list[tuple[Any, str]] = [
        (memory[:64], "is too small"),
        (memory[::2], "contiguous"),
        (memory.view(1024, -1)[:, :512], "contiguous"),
        (memory[:0], "with elements"),
        (torch.zeros(8 << 18, device=device, requires_grad=True), "require grad"),
        (8 << 20, "expected"),
    ]
    if device == "cpu":
        wrong += [(read_only, "read-only"), (torch.zeros(8, dtype=torch.uint8, device="meta"), "memory")]
    else:
        wrong += [(torch.zeros(8 << 20, dtype=torch.uint8), "expected a tensor on cuda:0, got one on cpu")]
    for tensor, message in wrong:
        with pytest.raises((ArgumentError, hybridkv.DtypeError), match=message) as caught:
            make(device, memory=tensor)
        assert caught.value.argument == "memory"
    for memory_bytes, message in (
        (1000, "memory_bytes = 1000 is too small"),
        ((8 << 20) + 1, r"at most the size of memory, 8388608 bytes, got 8388609"),
    ):
        with pytest.raises(ArgumentError, match=message) as caught:
            make(device, memory=memory, memory_bytes=memory_bytes)
        assert caught.value.argument == "memory_bytes"


def test_too_small_says_how_much_is_enough(device: str) -> None:
    """So many bytes at an address that is a multiple of 512, at most 511 more at any other."""
    with pytest.raises(ArgumentError, match="and up to 511 more to begin at a multiple of 512") as caught:
        make(device, memory=torch.zeros(100, dtype=torch.uint8, device=device))
    assert caught.value.argument == "memory"
    found = re.search(r"takes (\d+) bytes", str(caught.value))
    assert found
    n_bytes = int(found.group(1))
    lent = Lent(n_bytes + 511, device)
    cache = make(device, memory=lent.memory)
    assert cache.stats().max_tokens == cache.config.block_size
    assert lent.is_unhurt()
    whole = torch.zeros(n_bytes + 512, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % 512
    make(device, memory=whole[start : start + n_bytes])
    for less in (whole[start : start + n_bytes - 1], whole[start + 1 : start + 1 + n_bytes]):
        with pytest.raises(ArgumentError, match="is too small"):
            make(device, memory=less)


def store(device: str, memory: Any = None) -> hybridkv.Store:
    return hybridkv.Store(
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        dtype="float16",
        num_blocks=50,
        max_rows=4,
        max_new_tokens=512,
        device=device,
        memory=memory,
    )


def test_store_says_what_it_needs(device: str) -> None:
    small = torch.zeros(1000, dtype=torch.uint8, device=device)
    with pytest.raises(ArgumentError, match="memory of 1000 bytes is too small") as caught:
        store(device, small)
    assert caught.value.argument == "memory"
    found = re.search(r"takes (\d+)", str(caught.value))
    assert found
    lent = Lent(int(found.group(1)) + 511, device)
    store(device, lent.memory)
    assert lent.is_unhurt()
    with pytest.raises(ArgumentError, match="is too small"):
        store(device, Lent(int(found.group(1)) - 1, device).memory)


@pytest.mark.parametrize("bits", [0, 8])
def test_engine_on_a_store_in_lent_memory(device: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of the attached tests, its store in memory between guards."""
    lent = Lent(2 * ENOUGH[device], device)
    plain = hybridkv.Store

    def in_lent_memory(*args: Any, **options: Any) -> hybridkv.Store:
        return plain(*args, memory=lent.memory, **options)

    monkeypatch.setattr(hybridkv, "Store", in_lent_memory)
    engine = Engine(bits=bits, device=device, seed=3)
    names = [engine.add() for _ in range(3)]
    engine.step({name: (list(range(n)), n) for name, n in zip(names, (31, 64, 161), strict=True)})
    for _ in range(70):
        engine.step({name: ([7], 1) for name in names})
    assert lent.is_unhurt()
    assert to_host(lent.memory != POISON).any()
