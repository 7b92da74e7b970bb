"""The Python face of caches and stores: index arguments, handles, steps, threads, statistics, the command, types."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import attend, to_host

import hybridkv
from hybridkv import ArgumentError, BusyError, DtypeError, Error, StaleHandleError, StepError, _core
from hybridkv.cli import main

MakeCache = Callable[..., hybridkv.Cache]
ROOT = Path(__file__).parent.parent


def ones(n: int, heads: int = 2, dim: int = 32) -> np.ndarray:
    return np.ones((n, heads, dim), np.float16)


def grow(cache: hybridkv.Cache, sequence: hybridkv.Sequence, n: int, token_ids: Any = None) -> None:
    with cache.step([sequence], [n], token_ids) as step:
        for layer in range(cache.num_layers):
            attend(cache.device, step, layer, ones(n), ones(n), ones(n))


# ------------------------------------------------------------------------------------------------------ index arguments

INTEGERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "numpy ints in a list": lambda x: [np.int16(i) for i in x],
    **{f"numpy {d}": lambda x, d=d: np.array(x, d) for d in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")},
    "numpy strided": lambda x: np.repeat(np.array(x, np.int32), 2)[::2],
    "numpy reversed": lambda x: np.array(x[::-1], np.int64)[::-1],
    **{f"torch {d}": lambda x, d=d: torch.tensor(x).to(d) for d in (torch.int64, torch.int32, torch.uint8)},
    "torch strided": lambda x: torch.tensor(x).repeat_interleave(3)[::3],
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_any_kind(make_cache: MakeCache, kind: str) -> None:
    """Every way to write the same numbers means the same: lengths, token ids, orders, tables."""
    make = INTEGERS[kind]
    cache = make_cache(max_tokens=512)
    prompt = list(range(100))
    first, second = cache.add_sequence(make(prompt)), cache.add_sequence()
    with cache.step([first, second], make([100, 3]), make([*prompt, 1, 2, 3])) as step:
        for layer in range(2):
            step.attend(layer, ones(103), ones(103), ones(103))
    cache.free(first)
    third = cache.add_sequence(make(prompt))
    assert third.num_cached == 99
    cache.reorder([third, second], make([1, 1]))
    assert (third.length, second.length) == (3, 3)


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_any_kind_in_a_store(kind: str) -> None:
    make = INTEGERS[kind]
    store = make_store()
    table = np.array([[3, 1], [2, 0]])
    kinds = {"list": table.tolist(), "tuple": tuple(map(tuple, table.tolist()))}
    as_table = kinds.get(
        kind, torch.tensor(table).t().contiguous().t() if "torch" in kind else np.asfortranarray(table)
    )
    slots = (list if kind == "numpy i1" else make)([*range(192, 256), 64, 128, 129])  # too large for int8
    store.begin(make([0, 65, 67]), make([65, 2]), as_table, slots, make([0, 0]), clock=5)
    store.attend(0, ones(67), ones(67), ones(67))
    assert store.block_info(3)["sealed"]
    assert store.block_info(1)["n_hot_tokens"] == 1
    assert store.block_info(2)["n_hot_tokens"] == 2


WRONG_INTEGERS: dict[str, tuple[Any, type[Exception], str]] = {
    "reals": (np.array([1.0]), DtypeError, r"expected integers, got float64 \[1\]"),
    "a real": ([1.0], DtypeError, r"expected an integer, got float"),
    "a bool": ([True], DtypeError, r"expected an integer, got bool"),
    "a NumPy bool": ([np.True_], DtypeError, r"expected an integer, got numpy.bool"),
    "bools": (torch.tensor([True]), DtypeError, r"expected integers, got bool8 \[1\]"),
    "text": ("12", DtypeError, r"as a list, array or tensor, got str"),
    "bytes": (b"12", DtypeError, r"as a list, array or tensor, got bytes"),
    "a number": (7, DtypeError, r"as a list, array or tensor, got int"),
    "letters": (["a"], DtypeError, r"expected an integer, got str"),
    "None inside": ([None], DtypeError, r"expected an integer, got NoneType"),
    "two dimensions": (np.zeros((1, 1), np.int64), ArgumentError, r"expected shape \[n\], got int64 \[1, 1\]"),
    "no dimension": (np.array(3), ArgumentError, r"expected shape \[n\], got int64 \[\]"),
    "negative": ([-1], ArgumentError, r"expected integers in 0\.\.9223372036854775807, got -1"),
    "negative in a tensor": (torch.tensor([5, -3]), ArgumentError, r"got -3 at index 1"),
    "huge": ([2**63], ArgumentError, r"got one beyond 64 bits"),
    "huge in a tensor": (np.array([1, 2**63], np.uint64), ArgumentError, r"got one beyond 63 bits at index 1"),
    "an object array": (np.array([1], object), DtypeError, r"NumPy dtype O8"),
    "big-endian": (np.array([1], ">i4"), DtypeError, r"native byte order"),
}


@pytest.mark.parametrize("name", WRONG_INTEGERS)
def test_wrong_token_ids(make_cache: MakeCache, name: str) -> None:
    value, kind, message = WRONG_INTEGERS[name]
    cache = make_cache()
    with pytest.raises(kind, match=rf"token_ids: .*{message}") as caught:
        cache.add_sequence(value)
    assert caught.value.argument == "token_ids"
    assert cache.stats().n_sequences == 0


def test_an_index_that_changes_its_list(make_cache: MakeCache) -> None:
    """Conversion runs Python code; a list that shrinks under it must not be read beyond its end."""
    numbers: list[Any] = []

    class Shrinking:
        def __index__(self) -> int:
            numbers.clear()
            return 1

    numbers += [Shrinking(), 2, 3]
    assert make_cache().add_sequence(numbers).length == 0
    with pytest.raises(ZeroDivisionError):
        make_cache().add_sequence([_Raising()])


class _Raising:
    def __index__(self) -> int:
        raise ZeroDivisionError


def test_wrong_step_arguments(make_cache: MakeCache) -> None:
    cache = make_cache()
    first, second = cache.add_sequence(), cache.add_sequence()
    other = make_cache().add_sequence()
    freed = cache.add_sequence()
    cache.free(freed)
    before = cache.stats()
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: cache.step([first], [1, 2]), ArgumentError, r"num_tokens: expected .* 1 entries, got 2"),
        (lambda: cache.step([first], [-1]), ArgumentError, r"num_tokens: .*got -1"),
        (lambda: cache.step([first], [2**40]), ArgumentError, r"num_tokens: .*got 1099511627776"),
        (lambda: cache.step([first], 3), DtypeError, r"num_tokens: .*got int"),
        (lambda: cache.step([first], [10**6]), Error, r"."),
        (lambda: cache.step([first], [3], [1, 2]), ArgumentError, r"token_ids: expected .* 3 entries, got 2"),
        (lambda: cache.step([first, second], [1, 1], [[1, 2], []]), ArgumentError, r"token_ids: .*lists of \[2, 0\]"),
        (lambda: cache.step([first], [1], clock="now"), DtypeError, r"clock: expected an integer, got str"),
        (lambda: cache.step([first, first], [1, 1]), ArgumentError, r"sequences"),
        (lambda: cache.step([other], [1]), StaleHandleError, r"sequence: 0x[0-9a-f]+ belongs to another cache"),
        (lambda: cache.step([freed], [1]), StaleHandleError, r"."),
        (lambda: cache.step([first.id], [1]), DtypeError, r"sequence: expected a hybridkv.Sequence, got int"),
        (lambda: cache.truncate(first, 1), ArgumentError, r"num_tokens"),
        (lambda: cache.truncate(first, -1), ArgumentError, r"num_tokens: .*got -1"),
        (lambda: cache.reorder([first, second], [0]), ArgumentError, r"source_indices: expected .* 2 entries, got 1"),
        (lambda: cache.reorder([first, second], [0, 2]), ArgumentError, r"source_indices: .*0\.\.1, got 2"),
        (lambda: cache.read_tokens(first, 0, 0, 1), ArgumentError, r"start: .*<= 0, .*got start 0 and stop 1"),
        (lambda: cache.read_tokens(first, 9), ArgumentError, r"layer"),
        (lambda: cache.read_tokens(first, 0, framework="jax"), ArgumentError, r"framework: .*'jax'"),  # type: ignore[arg-type]
        (lambda: cache.tiers(first, 0, 2), ArgumentError, r"kv_head"),
        (lambda: cache.tiers(first, 2, 0), ArgumentError, r"layer"),
        (lambda: cache.set_tier(first, 0, 0, 0, "L3"), ArgumentError, r"tier: expected \"L1\" or \"L2\", got 'L3'"),  # type: ignore[arg-type]
        (lambda: cache.set_tier(first, 0, 0, 5, "L2"), Error, r"block"),
        (lambda: cache.block_table(first, -1), ArgumentError, r"layer"),
        (lambda: cache.export_pages(2), ArgumentError, r"layer"),
        (lambda: cache.add_sequence(salt="text"), TypeError, r"bytes-like"),  # type: ignore[arg-type]
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
        assert cache.stats() == before
    cache.check()


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "num_layers": ({"num_layers": 0}, ArgumentError, "0"),
    "num_layers negative": ({"num_layers": -1}, ArgumentError, "-1"),
    "num_layers huge": ({"num_layers": 2**31}, ArgumentError, "2147483648"),
    "num_kv_heads": ({"num_kv_heads": 0}, ArgumentError, "0"),
    "num_kv_heads text": ({"num_kv_heads": "2"}, DtypeError, "str"),
    "head_dim": ({"head_dim": 40}, ArgumentError, "40"),
    "head_dim large": ({"head_dim": 272}, ArgumentError, "272"),
    "head_dim real": ({"head_dim": 64.0}, DtypeError, "float"),
    "dtype": ({"dtype": "int8"}, DtypeError, "int8"),
    "dtype torch": ({"dtype": torch.float64}, DtypeError, "float64"),
    "dtype NumPy": ({"dtype": np.int32}, DtypeError, "int32"),
    "device": ({"device": "tpu"}, ArgumentError, "tpu"),
    "memory_bytes": ({"memory_bytes": -1}, ArgumentError, "-1"),
    "memory_bytes small": ({"memory_bytes": 1000}, ArgumentError, "1000"),
    "memory_bytes zero": ({"memory_bytes": 0}, ArgumentError, "0"),
    "max_tokens": ({"max_tokens": -5}, ArgumentError, "-5"),
    "max_tokens huge": ({"max_tokens": 2**62}, Error, ""),
    "max_sequences": ({"max_sequences": 0}, ArgumentError, "0"),
    "max_step_tokens": ({"max_step_tokens": 1}, ArgumentError, "1"),
    "layer_windows": ({"layer_windows": [64]}, ArgumentError, "got 1"),
    "layer_windows negative": ({"layer_windows": [64, -1]}, ArgumentError, "-1"),
    "hot_memory_bytes": ({"hot_memory_bytes": -1}, ArgumentError, "-1"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options_of_a_cache(make_cache: MakeCache, name: str) -> None:
    options, kind, shown = WRONG_OPTIONS[name]
    with pytest.raises(kind) as caught:
        make_cache(**options)
    if kind is not Error:
        assert caught.value.argument == next(iter(options))
    assert shown in str(caught.value)


def test_memory_must_be_bounded() -> None:
    with pytest.raises(ArgumentError, match="memory_bytes"):
        hybridkv.Cache(num_layers=1, num_kv_heads=1, head_dim=32, dtype="float16")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_a_device_that_is_not_there_says_what_is_missing(make_cache: MakeCache, device: str) -> None:
    reason = next(reason for name, count, reason in _core.devices() if name == "cuda")
    if not reason:
        pytest.skip("there is a CUDA device")
    name = "cuda:0" if device == "cuda" else device
    with pytest.raises(hybridkv.NoDeviceError, match=f"device: '{name}': ") as caught:
        make_cache(device=device)
    assert caught.value.argument == "device"
    assert reason in str(caught.value)


# ---------------------------------------------------------------------------------------------------- handles and steps


def test_sequences(make_cache: MakeCache) -> None:
    cache = make_cache()
    sequence = cache.add_sequence()
    assert sequence.alive
    assert bool(sequence)
    assert len(sequence) == sequence.length == sequence.num_cached == 0
    grow(cache, sequence, 70)
    assert repr(sequence) == f"<hybridkv.Sequence {sequence.id:#x} length=70>"
    forked = cache.fork(sequence)
    cache.truncate(forked, 10)
    assert (len(sequence), len(forked)) == (70, 10)
    cache.free(sequence)
    assert not sequence.alive
    assert "freed" in repr(sequence)
    reused = cache.add_sequence()
    assert reused.id != sequence.id
    for stale in (lambda: sequence.length, lambda: cache.fork(sequence), lambda: cache.free(sequence)):
        with pytest.raises(StaleHandleError):
            stale()
    cache.reset()
    assert not reused.alive
    assert not forked.alive
    assert cache.stats().n_tokens == 0


def fail_after(cache: hybridkv.Cache, sequence: hybridkv.Sequence, n_layers: int) -> None:
    with cache.step([sequence], [40]) as step:
        for layer in range(n_layers):
            attend(cache.device, step, layer, ones(40) * 3, ones(40) * 3, ones(40) * 3)
        raise KeyError


def test_an_exception_rolls_the_step_back(make_cache: MakeCache, device: str) -> None:
    """After any number of attended layers, all of them included, and with copy-on-write under way."""
    for n_attended in (0, 1, 2):
        cache = make_cache(device=device)
        sequence = cache.add_sequence()
        grow(cache, sequence, 100)
        forked = cache.fork(sequence)
        before = [cache.read_tokens(sequence, layer) for layer in range(2)]
        with pytest.raises(KeyError):
            fail_after(cache, forked, n_attended)
        assert (sequence.length, forked.length) == (100, 100)
        for layer in range(2):
            for ours, theirs in zip(cache.read_tokens(forked, layer), before[layer], strict=True):
                assert torch.equal(to_host(ours), to_host(theirs))
        grow(cache, forked, 5)
        assert forked.length == 105
        cache.check()


def test_steps_close_once(make_cache: MakeCache) -> None:
    cache = make_cache()
    sequence = cache.add_sequence()
    step = cache.step([sequence], [4])
    assert step.num_tokens == 4
    assert sequence.length == 4
    with pytest.raises(StepError):
        cache.step([sequence], [1])
    step.attend(0, ones(4), ones(4), ones(4))
    with pytest.raises(StepError, match="layer"):
        step.attend(0, ones(4), ones(4), ones(4))
    step.abort()
    assert sequence.length == 0
    following = cache.step([sequence], [2])
    following.prefetch_hot(1)
    for closed in (
        step.end,
        step.abort,
        lambda: step.attend(0, ones(4), ones(4), ones(4)),
        lambda: step.prefetch_hot(0),
    ):
        with pytest.raises(StepError, match="this step is closed"):
            closed()
    for layer in range(2):
        following.attend(layer, ones(2), ones(2), ones(2))
    following.end()
    assert sequence.length == 2
    with pytest.raises(StepError):
        following.end()


def test_a_layer_that_was_left_out_takes_the_step_back(make_cache: MakeCache, device: str) -> None:
    cache = make_cache(device=device)
    sequence = cache.add_sequence()
    with cache.step([sequence], [4]) as step:
        attend(device, step, 1, ones(4), ones(4), ones(4))
    assert sequence.length == 0


class Graph:
    """Stands for a captured graph."""

    def __init__(self, fails: bool = False) -> None:
        self.n_replays = 0
        self.fails = fails

    def replay(self) -> None:
        if self.fails:
            raise RuntimeError("from the driver")
        self.n_replays += 1


def test_replays_stand_for_all_layers(make_cache: MakeCache) -> None:
    cache = make_cache()
    sequence, graph = cache.add_sequence(), Graph()
    with cache.step([sequence], [4]) as step:
        step.replay(graph)
        with pytest.raises(StepError, match="layer 0 was attended in this step already"):
            step.attend(0, ones(4), ones(4), ones(4))
    assert (sequence.length, graph.n_replays) == (4, 1)
    with cache.step([sequence], [0]) as step:
        step.replay(graph)
    assert graph.n_replays == 1, "there is nothing to compute"
    with pytest.raises(StepError, match="closed"):
        step.replay(graph)
    with pytest.raises(StepError, match="no step is open"):
        cache._core.mark_attended()
    with pytest.raises(RuntimeError, match="driver"), cache.step([sequence], [4]) as step:
        step.replay(Graph(fails=True))
    assert sequence.length == 4


def test_empty_steps(make_cache: MakeCache) -> None:
    cache = make_cache()
    sequence = cache.add_sequence()
    for rows, counts in (([], []), ([sequence], [0])):
        with cache.step(rows, counts) as step:
            for layer in range(2):
                out, lse = step.attend(layer, ones(0), ones(0), ones(0), return_lse=True)
                assert (out.shape, lse.shape) == ((0, 2, 32), (0, 2))
    assert sequence.length == 0


def test_token_ids_by_sequence(make_cache: MakeCache) -> None:
    """A list for each sequence means the same as one flat list, also as arrays."""
    for ids in ([[1] * 64, [2] * 70], [*[1] * 64, *[2] * 70], [torch.ones(64).int(), np.full(70, 2)]):
        cache = make_cache()
        pair = cache.add_sequence(), cache.add_sequence()
        with cache.step(pair, [64, 70], ids) as step:
            for layer in range(2):
                step.attend(layer, ones(134), ones(134), ones(134))
        for sequence in pair:
            cache.free(sequence)
        assert cache.add_sequence([1] * 65).num_cached == 64
        assert cache.add_sequence([2] * 71).num_cached >= 64


def test_closing(make_cache: MakeCache) -> None:
    cache = make_cache()
    sequence = cache.add_sequence()
    with cache as same:
        assert same is cache
        grow(cache, sequence, 3)
    cache.close()
    assert not sequence.alive
    for call in (cache.stats, cache.check, cache.reset, cache.add_sequence, lambda: sequence.length):
        with pytest.raises(StepError, match="the Cache is closed"):
            call()


def test_close_with_a_step_open(make_cache: MakeCache) -> None:
    cache = make_cache()
    step = cache.step([cache.add_sequence()], [3])
    cache.close()
    with pytest.raises(StepError, match="closed"):
        step.attend(0, ones(3), ones(3), ones(3))


def test_tiers_and_tables(make_cache: MakeCache) -> None:
    cache = make_cache()
    sequence = cache.add_sequence()
    grow(cache, sequence, 200)
    assert cache.tiers(sequence, 0, 1) == ["L1", "L1", "L1", None]
    cache.set_tier(sequence, 0, 1, 1, "L2")
    assert cache.tiers(sequence, 0, 1) == ["L1", "L2", "L1", None]
    assert cache.tiers(sequence, 1, 1) == ["L1", "L1", "L1", None]
    table = cache.block_table(sequence, 0)
    assert len(set(table)) == 4
    assert min(table) > 0
    windowed = make_cache(layer_windows=[None, 64], prefix_reuse=False)
    sequence = windowed.add_sequence()
    for _ in range(5):
        grow(windowed, sequence, 64)
    assert windowed.block_table(sequence, 1)[:3] == [0, 0, 0]
    assert 0 not in windowed.block_table(sequence, 0)


def test_frameworks_of_read_tokens(make_cache: MakeCache) -> None:
    cache = make_cache()
    sequence = cache.add_sequence()
    grow(cache, sequence, 70)
    k, v = cache.read_tokens(sequence, 0)
    assert isinstance(k, np.ndarray)
    assert k.shape == v.shape == (70, 2, 32)
    assert k.dtype == np.float16
    assert np.allclose(k, 1, atol=1e-3)
    as_torch, _ = cache.read_tokens(sequence, 0, 5, 9, framework="torch")
    assert torch.equal(as_torch, torch.from_numpy(k[5:9]))
    assert cache.read_tokens(sequence, 0, 70)[0].shape == (0, 2, 32)
    brain = make_cache(dtype="bfloat16")
    assert isinstance(brain.read_tokens(brain.add_sequence(), 0)[0], torch.Tensor)
    with pytest.raises(ArgumentError, match="NumPy has no bfloat16"):
        brain.read_tokens(brain.add_sequence(), 0, framework="numpy")


def test_statistics(make_cache: MakeCache) -> None:
    cache = make_cache(memory_bytes=8 << 20)
    sequence = cache.add_sequence()
    grow(cache, sequence, 200)
    stats = cache.stats()
    kinds = ("record", "hot", "directory", "table", "prefix", "workspace", "unused")
    assert (
        sum(getattr(stats, f"{kind}_bytes") for kind in kinds) == stats.allocated_bytes <= stats.memory_bytes == 8 << 20
    )
    assert (stats.n_sequences, stats.n_tokens, stats.counters["n_steps"]) == (1, 200, 1)
    flat = stats.as_dict()
    assert flat["n_tokens"] == 200
    assert flat["n_tokens_appended"] == stats.counters["n_tokens_appended"] == 200
    html = cache._repr_html_()
    assert "1, 200" in html
    assert "2 x 2 x 32" in html
    assert repr(cache) == "<hybridkv.Cache 2 layers x 2 KV heads x 32, float16 on cpu, bits 8>"


def test_counters_are_those_of_the_header() -> None:
    header = (ROOT / "csrc/hkv.h").read_text()
    struct = re.search(r"typedef struct hkv_counters \{(.*?)\} hkv_counters;", header, re.DOTALL)
    assert struct
    names = re.findall(r"^\s+(?:uint64_t|double) (\w+);", struct.group(1), re.MULTILINE)
    assert sorted(make_store().counters()) == sorted(names)


# ---------------------------------------------------------------------------------------------------------------- store


def make_store(**options: Any) -> hybridkv.Store:
    defaults = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "dtype": "float16", "num_blocks": 4, "max_rows": 2}
    store = hybridkv.Store(**{**defaults, "max_new_tokens": 128, **options})
    store.bind_layer(0, np.zeros((4, 2, store.record_bytes), np.uint8))
    return store


def test_store_page_layouts() -> None:
    """[blocks, Hkv, bytes], [blocks, bytes], wider elements and gaps between blocks and heads all hold the same."""
    record = make_store().record_bytes
    gaps = np.zeros((4, 3, record + 64), np.uint8)
    pages = [
        np.zeros((4, 2, record), np.uint8),
        np.zeros((4, 2 * record), np.uint8),
        torch.zeros(5, 2, record // 2, dtype=torch.bfloat16),
        gaps[:, :2, :record],
        torch.zeros(2, 4, record, dtype=torch.int8).transpose(0, 1),
    ]
    k = np.random.default_rng(0).standard_normal((64, 2, 32)).astype(np.float16)
    contents = []
    for layout in pages:
        store = make_store()
        store.bind_layer(0, layout)
        store.begin([0, 64], [64], [[2]], range_list(128, 192))
        store.attend(0, k, k, k)
        contents.append(store.read_tokens(0, [2], 64))
    for content in contents[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(content, contents[0], strict=True))
    assert (gaps[:, 2] == 0).all()
    assert (gaps[:, :, record:] == 0).all()
    assert (gaps[2, :2, :record] != 0).any()


def range_list(first: int, last: int) -> list[int]:
    return list(range(first, last))


def test_wrong_store_arguments() -> None:
    store = make_store()
    record = store.record_bytes

    def begin(**changed: Any) -> None:
        right = {"cu_new_tokens": [0, 1], "seq_lens": [1], "block_table": [[1]], "slot_mapping": [64]}
        store.begin(**{**right, **changed})

    bytes_ = np.uint8
    read_only = np.zeros((4, 2, record), bytes_)
    read_only.setflags(write=False)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: store.bind_layer(1, np.zeros((4, 2, record), bytes_)), ArgumentError, r"layer: .*got 1"),
        (lambda: store.bind_layer(0, np.zeros((3, 2, record), bytes_)), ArgumentError, r"pages: .*blocks at least 4"),
        (lambda: store.bind_layer(0, np.zeros((4, 1, record), bytes_)), ArgumentError, r"pages: .*Hkv at least 2"),
        (lambda: store.bind_layer(0, np.zeros((4, 2, record - 1), bytes_)), ArgumentError, r"pages: .*bytes at least"),
        (lambda: store.bind_layer(0, np.zeros((4, 2 * record - 1), bytes_)), ArgumentError, r"pages: .*bytes at least"),
        (lambda: store.bind_layer(0, np.zeros(4 * 2 * record, bytes_)), ArgumentError, r"pages: expected"),
        (lambda: store.bind_layer(0, read_only), ArgumentError, r"pages: .*read-only"),
        (lambda: store.bind_layer(0, np.zeros((4, 2, record + 1), bytes_)), ArgumentError, r"stride"),
        (lambda: store.bind_layer(0, None), DtypeError, r"pages: expected a NumPy array"),
        (lambda: begin(cu_new_tokens=[0]), ArgumentError, r"cu_new_tokens: .*2 entries, got 1"),
        (lambda: begin(cu_new_tokens=[0, -1]), ArgumentError, r"cu_new_tokens: .*got -1"),
        (lambda: begin(slot_mapping=[64, 65]), ArgumentError, r"slot_mapping: .*1 entries, got 2"),
        (lambda: begin(slot_mapping=[64.0]), DtypeError, r"slot_mapping: .*float"),
        (lambda: begin(slot_mapping=[4 * 64]), ArgumentError, r"slot_mapping"),
        (lambda: begin(block_table=[[4]]), ArgumentError, r"block_table"),
        (lambda: make_store(max_sequence_tokens=-1), ArgumentError, r"max_sequence_tokens"),
        (lambda: store.prefetch_hot(1), ArgumentError, r"layer: .*got 1"),
        (lambda: make_store().prefetch_hot(0), StepError, r"begin|bind"),
        (lambda: begin(max_row_tokens=-1), ArgumentError, r"max_row_tokens must be 0.*got -1"),
        (lambda: begin(max_row_tokens="1"), DtypeError, r"max_row_tokens"),
        (lambda: begin(stream=-1), ArgumentError, r"stream: .*got -1"),
        (lambda: begin(stream=64), ArgumentError, r"stream: there are no streams on the CPU, got 0x40"),
        (lambda: begin(stream="x"), DtypeError, r"stream"),
        (lambda: begin(block_table=[1]), DtypeError, r"block_table: .*got int"),
        (lambda: begin(block_table=[[1], [2]]), ArgumentError, r"block_table: .*1 entries, got 2"),
        (lambda: begin(seq_lens=np.array([1], np.float32)), DtypeError, r"seq_lens: .*float32"),
        (lambda: begin(seq_lens=[2**31]), ArgumentError, r"seq_lens: .*got 2147483648"),
        (lambda: begin(seq_lens=[65]), ArgumentError, r"block_table"),
        (
            lambda: begin(cu_new_tokens=[0, 1, 1], seq_lens=[1, 1], block_table=[[1], [2, 3]]),
            ArgumentError,
            r"block_table: .*row 1 has 2 entries and row 0 has 1",
        ),
        (lambda: begin(copy_sources=[1, 1]), ArgumentError, r"copy_sources: .*1 entries, got 2"),
        (lambda: begin(clock=1.5), DtypeError, r"clock: .*float"),
        (lambda: store.attend(0, ones(1), ones(1), ones(1)), StepError, r"."),
        (lambda: store.tier(0, 2, 1), ArgumentError, r"kv_head"),
        (lambda: store.set_tier(0, 0, 1, "L1"), Error, r"block 1 is not sealed"),
        (lambda: store.block_info(4), ArgumentError, r"block"),
        (lambda: store.read_tokens(0, [1], 65), ArgumentError, r"seq_len: .*got 65"),
        (lambda: store.read_tokens(0, [1], 5, 3, 2), ArgumentError, r"start: .*start 3 and stop 2"),
        (lambda: make_store(num_blocks=0), ArgumentError, r"num_blocks"),
        (lambda: make_store(max_rows=-1), ArgumentError, r"max_rows"),
        (lambda: make_store(window_tokens=-1), ArgumentError, r"window_tokens"),
        (lambda: make_store(head_dim="32"), DtypeError, r"head_dim: .*str"),
        (lambda: make_store(device="cuda"), hybridkv.NoDeviceError, r"device"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    begin()
    store.attend(0, ones(1), ones(1), ones(1))
    store.close()
    with pytest.raises(StepError, match="the Store is closed"):
        store.counters()


# -------------------------------------------------------------------------------------------------------------- threads


def attend_long(step: hybridkv.Step) -> None:
    """One long call; who comes while another thread has a short one tries again."""
    x = ones(step.num_tokens, 8, 64)
    while True:
        try:
            step.attend(0, x, x, x)
            return
        except BusyError:
            continue


def test_the_gil_is_released_and_a_second_thread_is_told(make_cache: MakeCache) -> None:
    """While one thread attends, Python goes on, and another caller of the same cache gets BusyError at once."""
    cache = make_cache(num_layers=1, num_kv_heads=8, head_dim=64, max_tokens=8192)
    step = cache.step([cache.add_sequence()], [4096])
    worker = threading.Thread(target=attend_long, args=(step,))
    outcomes = []
    worker.start()
    while worker.is_alive():
        try:
            cache.stats()
            outcomes.append("answered")
        except BusyError as error:
            outcomes.append(error.status)
        time.sleep(1e-4)
    worker.join()
    assert any("in use" in outcome for outcome in outcomes)
    step.end()
    assert cache.stats().n_tokens == 4096


def test_close_under_another_thread_is_refused(make_cache: MakeCache) -> None:
    """The other thread's call keeps its memory; afterwards the cache can be closed."""
    cache = make_cache(num_layers=1, num_kv_heads=8, head_dim=64, max_tokens=8192)
    step = cache.step([cache.add_sequence()], [4096])
    worker = threading.Thread(target=attend_long, args=(step,))
    worker.start()
    while worker.is_alive():
        try:
            cache.stats()
        except BusyError:  # the long call is under way
            with pytest.raises(BusyError):
                cache.close()
            break
        time.sleep(1e-4)  # leave the cache to the other thread
    else:
        pytest.fail("the call was over before anything else ran")
    worker.join()
    step.end()
    assert cache.stats().n_tokens == 4096
    cache.close()


def test_caches_in_many_threads() -> None:
    """Objects of their own, one pool: results as in one thread."""
    config = hybridkv.HybridConfig()
    x = np.random.default_rng(1).standard_normal((150, 2, 32)).astype(np.float16)

    def work(_: int) -> bytes:
        with hybridkv.Cache(
            config, num_layers=1, num_kv_heads=2, head_dim=32, dtype="float16", max_tokens=256, max_sequences=1
        ) as cache:
            sequence = cache.add_sequence()
            result = b""
            for part in (slice(0, 100), slice(100, 101), slice(101, 150)):
                with cache.step([sequence], [len(x[part])]) as step:
                    result += step.attend(0, x[part], x[part], x[part]).tobytes()
            return result

    want = work(0)
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.extend(work(i) for i in range(5))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"
    assert results == [want] * 30


def test_number_of_threads() -> None:
    before = hybridkv.get_num_threads()
    try:
        hybridkv.set_num_threads(3)
        assert hybridkv.get_num_threads() == 3
    finally:
        hybridkv.set_num_threads(before)
    for wrong, kind in (
        (0, ArgumentError),
        (-1, ArgumentError),
        (1e3, DtypeError),
        (True, DtypeError),
        (10**6, ArgumentError),
    ):
        with pytest.raises(kind, match="num_threads"):
            hybridkv.set_num_threads(wrong)  # type: ignore[arg-type]
    assert hybridkv.get_num_threads() == before


# --------------------------------------------------------------------------------------- errors, command, types, import


def test_errors_have_two_bases() -> None:
    kinds = {
        "ConfigError": ValueError,
        "ArgumentError": ValueError,
        "DtypeError": TypeError,
        "CacheFullError": MemoryError,
        "OutOfMemoryError": MemoryError,
        "StepError": RuntimeError,
        "BusyError": RuntimeError,
        "StaleHandleError": ValueError,
        "NoDeviceError": RuntimeError,
        "DeviceError": RuntimeError,
    }
    for name, builtin in kinds.items():
        kind = getattr(hybridkv, name)
        assert issubclass(kind, Error)
        assert issubclass(kind, builtin)
        assert (kind.__module__, kind.__doc__ is not None) == ("hybridkv", True)
        assert (kind("text").argument, kind("text").status) == ("", "")
    assert issubclass(hybridkv.CacheFullError, RuntimeError)


def test_out_of_memory_is_an_error(make_cache: MakeCache) -> None:
    with pytest.raises(Error) as caught:
        make_cache(memory_bytes=2**62)
    assert isinstance(caught.value, (hybridkv.OutOfMemoryError, ArgumentError))


def test_full_cache_can_be_retried(make_cache: MakeCache) -> None:
    cache = make_cache(max_tokens=256, prefix_reuse=False)
    first, second = cache.add_sequence(), cache.add_sequence()
    capacity = cache.stats().max_tokens
    grow(cache, first, capacity - 64)
    with pytest.raises(hybridkv.CacheFullError) as caught:
        cache.step([second], [128])
    assert caught.value.status == "cache full"
    cache.free(first)
    grow(cache, second, 128)


def test_devices() -> None:
    counts = hybridkv.devices()
    assert counts["cpu"] == 1
    assert counts["cuda"] >= 0


def test_info_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for name in ("hybridkv", "python", "cpu path", "threads", "devices", "packages"):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    assert main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["version"] == hybridkv.__version__
    assert info["cpu_path"] in info["cpu_paths"]
    assert [device["name"] for device in info["devices"]] == ["cpu", "cuda"]
    assert all(device["count"] or device["reason"] for device in info["devices"])
    assert info["packages"]["torch"] == torch.__version__ or info["packages"]["torch"] in torch.__version__
    monkeypatch.setenv("HYBRIDKV_CPU", "reference")
    assert main(["info"]) == 0
    assert "cpu path   reference" in capsys.readouterr().out
    monkeypatch.setenv("HYBRIDKV_CPU", "mmx")
    assert main(["info"]) == 1
    assert "mmx" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    with pytest.raises(SystemExit):
        main([])


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_neither_torch_nor_a_driver() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import hybridkv, numpy as np\n"
        "assert not [m for m in sys.modules if m.startswith(('torch.', 'transformers.'))]\n"
        "c = hybridkv.Cache(num_layers=1, num_kv_heads=1, head_dim=32, dtype='float16', max_tokens=64)\n"
        "x = np.ones((1, 1, 32), np.float16)\n"
        "with c.step([c.add_sequence()], [1]) as s: print(s.attend(0, x, x, x)[0, 0, 0])\n"
        "import os\n"
        "print([f for f in os.listdir('/proc/self/fd') if 'nvidia' in os.path.realpath('/proc/self/fd/' + f)])\n"
    )
    assert run_python(code).split("\n")[:2] == ["1.0", "[]"]


def test_module_can_be_torn_down_in_any_order() -> None:
    """Caches, views and the module itself, alive at exit or collected as garbage."""
    code = (
        "import gc, sys, numpy as np, hybridkv\n"
        "c = hybridkv.Cache(num_layers=1, num_kv_heads=1, head_dim=32, dtype='float16', max_tokens=64)\n"
        "a = np.from_dlpack(c.export_pages(0))\n"
        "for name in [n for n in sys.modules if n.startswith('hybridkv')]: del sys.modules[name]\n"
        "del hybridkv, c; gc.collect()\n"
        "print(a.sum() >= 0)\n"
    )
    assert run_python(code).strip() == "True"


def test_forked_child_makes_caches_of_its_own() -> None:
    code = (
        "import os, numpy as np, hybridkv\n"
        "def run():\n"
        "    c = hybridkv.Cache(num_layers=1, num_kv_heads=2, head_dim=32, dtype='float16', max_tokens=4096)\n"
        "    x = np.ones((2000, 2, 32), np.float16); s = c.add_sequence()\n"
        "    with c.step([s], [2000]) as step: return c, s, float(step.attend(0, x, x, x).mean())\n"
        "parent, sequence, value = run()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: sequence.length; os._exit(1)\n"
        "    except hybridkv.StaleHandleError: pass\n"
        "    os._exit(0 if abs(run()[2] - value) < 1e-3 else 2)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "print(sequence.length)\n"
    )
    assert run_python(code).strip() == "2000"


def stub_names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    names: dict[str, ast.stmt] = {node.name: node for node in body if isinstance(node, kinds)}
    names |= {
        node.target.id: node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return names


def test_stub_says_what_the_module_has() -> None:
    """Names of the module and of its types, and the parameters of every function and method."""
    stub = stub_names(ast.parse((ROOT / "hybridkv/_core.pyi").read_text()).body)
    assert set(stub) == {name for name in dir(_core) if not name.startswith("__") or name == "__version__"}
    for name, node in stub.items():
        if isinstance(node, ast.FunctionDef):
            assert_same_parameters(node, getattr(_core, name))
        elif isinstance(node, ast.ClassDef) and not issubclass(getattr(_core, name), Exception):
            members = stub_names(node.body)
            kind = getattr(_core, name)
            assert set(members) - {"__new__"} == set(vars(kind)) - {"__new__", "__doc__", "__module__"}
            for method_name, method in members.items():
                if isinstance(method, ast.FunctionDef) and not method.decorator_list and method_name != "__new__":
                    assert_same_parameters(method, getattr(kind, method_name))


def assert_same_parameters(node: ast.FunctionDef, function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter
    of_kind = {
        kind: [p.name for p in parameters if p.kind is kind] for kind in (kinds.POSITIONAL_ONLY, kinds.KEYWORD_ONLY)
    }
    stub_positional = [a.arg for a in node.args.posonlyargs]
    assert of_kind[kinds.KEYWORD_ONLY] == [a.arg for a in node.args.kwonlyargs], node.name
    assert [p.name for p in parameters if p.kind is not kinds.KEYWORD_ONLY] == stub_positional + [
        a.arg for a in node.args.args
    ], node.name


def test_records_by_hand() -> None:
    k, v = np.random.default_rng(2).standard_normal((2, 40, 64)).astype(np.float32)
    config = hybridkv.HybridConfig()
    record = hybridkv.record_encode(config, k, v)
    assert len(record) == hybridkv.record_layout(config, 64)["record_bytes"]
    errors = {}
    for precision in ("int4", "k8v4", "int8", None):
        decoded_k, decoded_v = hybridkv.record_decode(config, record, 64, precision)
        assert decoded_k.shape == decoded_v.shape == (40, 64)
        errors[precision] = (np.abs(decoded_k - k).max(), np.abs(decoded_v - v).max())
    assert errors["int8"] == errors[None]
    assert errors["k8v4"] == (errors["int8"][0], errors["int4"][1])
    assert errors["int8"][0] < errors["int4"][0] / 8
    for wrong, message in (
        (lambda: hybridkv.record_encode(config, k[:0], v[:0]), r"k: expected 1\.\.64 tokens, got 0"),
        (
            lambda: hybridkv.record_encode(config, np.zeros((65, 64), np.float32), np.zeros((65, 64), np.float32)),
            "got 65",
        ),
        (lambda: hybridkv.record_encode(config, k[:, :40], v[:, :40]), r"head_dim: .*got 40"),
        (lambda: hybridkv.record_encode(config, k, v[:-1]), r"v: expected shape \[n, D\] = \[40, 64\]"),
        (lambda: hybridkv.record_encode(config.replace(quantization_bits=0), k, v), r"bits: expected 8, 6 or 4"),
        (lambda: hybridkv.record_decode(config, record, 64, "int2"), r"precision: .*'int2'"),
        (lambda: hybridkv.record_decode(config, record[:-1], 64), r"record: expected \d+ bytes"),
        (lambda: hybridkv.record_decode(config, b"", 64), r"record: expected at least 64 bytes, got 0"),
        (lambda: hybridkv.record_decode(config, record, 17), r"head_dim: .*got 17"),
        (lambda: hybridkv.record_decode(config, bytes(len(record)), 64), r"record: expected format version 1, got 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            wrong()
    four = hybridkv.record_encode(config.replace(quantization_bits=4), k, v)
    with pytest.raises(ArgumentError, match=r"precision: the record's planes reach int4, not int8"):
        hybridkv.record_decode(config, four, 64, "int8")
