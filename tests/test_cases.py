"""Fault classes seen in other caches, each as a scenario for the managed cache.

The attention and attached-mode ones (1, 3-5, 7, 9, 10, 15-19) stand in test_attention.py and test_attached.py, those of
tensors crossing over (6, 14) in test_dlpack.py.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import attend, to_host
from reference import KvTable, PlainCache, attention, relative_error

import hybridkv


def small_cache(bits: int = 8, *, device: str = "cpu", **options: Any) -> hybridkv.Cache:
    config = hybridkv.HybridConfig(quantization_bits=bits, skip_mass=0.0, refine_mass=0.0)
    defaults: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 2,
        "head_dim": 32,
        "dtype": "bfloat16",
        "device": device,
        "max_tokens": 4096,
        "max_sequences": 8,
    }
    return hybridkv.Cache(config, **{**defaults, **options})


def run(
    cache: hybridkv.Cache, sequences: list[Any], k: torch.Tensor, v: torch.Tensor, counts: list[int], ids: Any = None
) -> torch.Tensor:
    """One step of one layer with q = 0: the output is the mean of the visible values."""
    with cache.step(sequences, counts, token_ids=ids) as step:
        return attend(cache.device, step, 0, torch.zeros_like(k), k, v)  # type: ignore[no-any-return]


def constant(cache: hybridkv.Cache, sequence: Any, n: int, value: float) -> torch.Tensor:
    """Append n tokens whose values are all `value`."""
    k = torch.randn(n, 2, 32).bfloat16()
    return run(cache, [sequence], k, torch.full_like(k, value), [n])


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
def test_case_2_degenerate_groups(device: str, bits: int) -> None:
    """Zero, constant, tiny and huge channels come back right, and nothing becomes infinite."""
    cache = small_cache(bits, device=device, dtype="float16", prefix_reuse=False)
    sequence = cache.add_sequence()
    k, v = torch.randn(2, 200, 2, 32).half()
    k[:, :, 0], k[:, :, 1] = 0.0, 3.0
    k[:, :, 2] = (1e-7 * torch.arange(200))[:, None]
    k[:, :, 3] = torch.where(torch.arange(200) % 2 == 0, 6e4, -6e4)[:, None]
    v[70] = 0.0
    with cache.step([sequence], [200]) as step:
        attend(cache.device, step, 0, torch.zeros(200, 2, 32).half(), k, v)
    stored_k, stored_v = (to_host(x).float() for x in cache.read_tokens(sequence, 0, 64, 128))
    assert stored_k.isfinite().all()
    assert stored_v.isfinite().all()
    assert torch.equal(stored_k[:, :, :2], k[64:128, :, :2].float())
    assert torch.equal(stored_v[6], torch.zeros(2, 32))
    assert (stored_k[:, :, 2] - k[64:128, :, 2].float()).abs().max() <= 2e-6
    assert (stored_k[:, :, 3] / k[64:128, :, 3].float() - 1).abs().max() <= {0: 0, 8: 0.005, 6: 0.005, 4: 0.005}[bits]


@pytest.mark.parametrize("bits", [0, 8])
def test_case_8_beams_and_cropping(device: str, bits: int) -> None:
    """Reordering, selecting and cropping act on every tier."""
    cache = small_cache(bits, device=device)
    rows = [cache.add_sequence() for _ in range(3)]
    for value, row in enumerate(rows):
        constant(cache, row, 200, float(value + 1))
    cache.reorder(rows, [2, 0, 0])
    probe = [run(cache, [row], torch.zeros(1, 2, 32).bfloat16(), torch.zeros(1, 2, 32).bfloat16(), [1]) for row in rows]
    for out, value in zip(probe, [3.0, 1.0, 1.0], strict=True):
        assert torch.allclose(out.float(), torch.full((1, 2, 32), value * 200 / 201), rtol=5e-3)
    for row in rows:
        cache.truncate(row, 131)
        assert row.length == 131
        k, v = (to_host(x).float() for x in cache.read_tokens(row, 0, 0, 131))
        assert v.unique().numel() == 1
        assert k.isfinite().all()
    with pytest.raises(hybridkv.ArgumentError, match="num_tokens"):
        cache.truncate(rows[0], 132)
    cache.truncate(rows[1], 0)
    assert torch.equal(constant(cache, rows[1], 70, 7.0).float(), torch.full((70, 2, 32), 7.0))
    cache.reset()
    fresh = cache.add_sequence()
    assert torch.equal(constant(cache, fresh, 70, 2.0).float(), torch.full((70, 2, 32), 2.0))


def test_case_11_no_token_of_another_sequence(device: str) -> None:
    """Sequences of constant values come and go in a small pool; each sees its own constant only."""
    rng = random.Random(0)
    cache = small_cache(8, device=device, max_tokens=1024, prefix_reuse=False)
    live: dict[int, Any] = {}
    for i in range(2000):
        name = rng.randrange(8)
        if name in live and rng.random() < 0.1:
            cache.free(live.pop(name))
        elif name not in live:
            live[name] = cache.add_sequence()
        if name in live:
            try:
                out = constant(cache, live[name], rng.choice([1, 1, 1, 40, 100]), float(name + 1))
            except hybridkv.CacheFullError:
                cache.free(live.pop(rng.choice(sorted(live))))
                continue
            assert torch.equal(out.float(), torch.full_like(out.float(), name + 1)), i


def test_case_22_prefixes_are_kept_apart(device: str) -> None:
    """No sharing across salts, formats or token boundaries; the same tokens and salt do share."""
    table = KvTable(1, 2, 32, torch.bfloat16)

    def fill(cache: hybridkv.Cache, tokens: list[int], salt: bytes) -> int:
        sequence = cache.add_sequence(tokens, salt=salt)
        new = tokens[sequence.num_cached :]
        k, v = table(0, new, sequence.num_cached)
        run(cache, [sequence], k, v, [len(new)], [new])
        cached = sequence.num_cached
        cache.free(sequence)
        return cached

    cache = small_cache(8, device=device)
    tokens = list(range(200))
    assert fill(cache, tokens, b"X") == 0
    assert fill(cache, tokens, b"Y") == 0
    assert fill(cache, tokens, b"") == 0
    assert fill(cache, tokens, b"X") == 199
    assert fill(cache, [1, 23] * 64, b"") == 0
    assert fill(cache, [12, 3] * 64, b"") == 0
    assert fill(cache, [0, *tokens], b"X") == 1, "a part of a block may be shared, never the wrong position"


def test_reused_parts_give_the_same_answers(device: str) -> None:
    """A sequence that takes over a prefix, full blocks and part of one, attends over the right values."""
    table = KvTable(1, 2, 32, torch.bfloat16)
    cache = small_cache(8, device=device)
    base = list(range(300))
    first = cache.add_sequence(base)
    k, v = table(0, base, 0)
    run(cache, [first], k, v, [300], [base])
    cache.free(first)
    for shared in [1, 63, 64, 65, 130, 250, 299]:
        tokens = base[:shared] + [1000 + shared] * 40
        sequence = cache.add_sequence(tokens)
        assert sequence.num_cached == shared
        new = tokens[shared:]
        k, v = table(0, new, shared)
        q = torch.randn(40, 4, 32).bfloat16()
        with cache.step([sequence], [40], token_ids=[new]) as step:
            out = attend(cache.device, step, 0, q, k, v)
        k_all, v_all = table(0, tokens, 0)
        want, _ = attention(q, k_all, v_all)
        assert relative_error(out, want) < 0.02
        cache.free(sequence)
        cache.check()


def in_forked_child(check: Callable[[], bool]) -> bool:
    """Run `check` in a fork of this process; False if it fails in any way."""
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = check()
        finally:
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_case_23_fork_of_the_process() -> None:
    """A forked child makes caches of its own; the inherited one says so, and its exit does not harm the parent."""
    inherited = small_cache(8, prefix_reuse=False)
    sequence = inherited.add_sequence()
    constant(inherited, sequence, 150, 1.0)

    def child() -> bool:
        with pytest.raises(hybridkv.StaleHandleError, match="fork"):
            constant(inherited, sequence, 3, 1.0)
        inherited.close()
        own = small_cache(8, prefix_reuse=False)
        return torch.equal(constant(own, own.add_sequence(), 150, 2.0).float(), torch.full((150, 2, 32), 2.0))

    assert in_forked_child(child)
    assert torch.equal(constant(inherited, sequence, 3, 1.0).float(), torch.ones(3, 2, 32))


def test_case_25_threads(device: str) -> None:
    """One cache from many threads: every call works or says BusyError. Caches side by side are independent."""
    shared = small_cache(8, device=device, max_tokens=8192, prefix_reuse=False)
    done: dict[int, int] = {}
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            own = small_cache(8, device=device, prefix_reuse=False)
            mine = own.add_sequence()
            finished = 0
            for i in range(30):
                out = constant(own, mine, 5 + i, float(name + 1))
                assert torch.equal(out.float(), torch.full_like(out.float(), name + 1))
                try:
                    sequence = shared.add_sequence()
                except (hybridkv.BusyError, hybridkv.StepError, hybridkv.CacheFullError):
                    continue
                finished += 1
                for _ in range(10000):
                    try:
                        shared.free(sequence)
                        break
                    except (hybridkv.BusyError, hybridkv.StepError):
                        continue
            done[name] = finished
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"
    assert not failures, failures
    shared.check()
    assert shared.stats().n_sequences == 0


def test_case_26_every_order_of_freeing(device: str) -> None:
    """Forks of a windowed sequence are freed in every order; reference counts end at zero once."""
    for order in itertools.permutations(range(3)):
        cache = small_cache(8, device=device, num_layers=2, layer_windows=[64, None])
        first = cache.add_sequence()

        def grow(sequence: Any, n: int, cache: hybridkv.Cache = cache) -> None:
            k = torch.randn(n, 2, 32).bfloat16()
            with cache.step([sequence], [n]) as step:
                for layer in (0, 1):
                    attend(cache.device, step, layer, k, k, k)

        grow(first, 150)
        family = [first, cache.fork(first), cache.fork(first)]
        grow(family[1], 200)
        cache.set_tier(family[2], 1, 0, 1, "L2")
        for index in order:
            cache.free(family[index])
            cache.check()
        assert cache.stats().n_blocks_live == 0
        with pytest.raises(hybridkv.StaleHandleError):
            cache.free(family[0])


def test_memory_is_accounted_for(device: str) -> None:
    """Every byte has a kind, and the bound holds whatever the shape."""
    for bits, heads, dim, windows in itertools.product((0, 4, 6, 8), (1, 8), (64, 128), (None, [100, None])):
        cache = small_cache(
            bits,
            device=device,
            num_layers=2,
            num_kv_heads=heads,
            head_dim=dim,
            layer_windows=windows,
            max_tokens=None,
            memory_bytes=48 << 20,
        )
        stats = cache.stats()
        kinds = ("record", "hot", "directory", "table", "prefix", "workspace", "unused")
        assert sum(getattr(stats, f"{kind}_bytes") for kind in kinds) == stats.allocated_bytes <= 48 << 20
        assert stats.max_tokens > 0


def test_bytes_per_token_at_32k(device: str) -> None:
    """Bits 8, D 128, one sequence of 32K tokens, everything counted: at most 0.55 of bf16.

    The scratch memory of a GPU is larger, and the same for any number of layers.
    """
    layers = 2 if device == "cpu" else 8
    cache = hybridkv.Cache(
        device=device,
        num_layers=layers,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        max_tokens=32768,
        max_sequences=1,
    )
    plain = 32768 * 2 * 8 * 128 * 2 * layers
    assert cache.stats().allocated_bytes <= 0.55 * plain


def test_full_cache_can_be_retried(device: str) -> None:
    """Running out changes nothing, and the same call works after a free."""
    cache = small_cache(8, device=device, max_tokens=512, prefix_reuse=False)
    first, second = cache.add_sequence(), cache.add_sequence()
    constant(cache, first, 400, 1.0)
    before = cache.stats()
    too_many = 64 * before.n_blocks_free + 1
    for _ in range(3):
        with pytest.raises(hybridkv.CacheFullError):
            constant(cache, second, too_many, 2.0)
        after = cache.stats()
        assert (after.n_blocks_free, after.n_blocks_live, after.n_tokens) == (
            before.n_blocks_free,
            before.n_blocks_live,
            before.n_tokens,
        )
        assert second.length == 0
    cache.free(first)
    assert torch.equal(constant(cache, second, too_many, 2.0).float(), torch.full((too_many, 2, 32), 2.0))


def failing_step(cache: hybridkv.Cache, sequence: Any, extra: torch.Tensor) -> None:
    """A forward pass that breaks after its first layer."""
    with cache.step([sequence], [len(extra)]) as step:
        attend(cache.device, step, 0, extra, extra, extra)
        raise RuntimeError("from the model")


def test_a_failed_forward_pass_is_undone(device: str) -> None:
    """An exception between two layers leaves the cache as it was before the step, in every layer."""
    for length in (10, 63, 64, 100, 127, 128):
        cache = small_cache(0, device=device, num_layers=2, prefix_reuse=False)
        sequence = cache.add_sequence()
        k, v = torch.randn(2, length, 2, 32).bfloat16()
        with cache.step([sequence], [length]) as step:
            for layer in (0, 1):
                attend(cache.device, step, layer, k, k, v)
        before = [[to_host(x).clone() for x in cache.read_tokens(sequence, layer, 0, length)] for layer in (0, 1)]
        extra = torch.full((70, 2, 32), 9.0).bfloat16()
        with pytest.raises(RuntimeError, match="from the model"):
            failing_step(cache, sequence, extra)
        assert sequence.length == length
        for layer in (0, 1):
            after = [to_host(x) for x in cache.read_tokens(sequence, layer, 0, length)]
            assert all(torch.equal(a, b) for a, b in zip(before[layer], after, strict=True))
        out = []
        with cache.step([sequence], [70]) as step:
            for layer in (0, 1):
                out.append(attend(cache.device, step, layer, extra, extra, extra))
        want, _ = attention(extra, torch.cat([k, extra]), torch.cat([v, extra]))
        assert relative_error(out[1], want) < 0.01
        assert math.isfinite(relative_error(out[0], want))


def test_plain_cache_model_reorders_like_the_real_one() -> None:
    """The model that the state machine trusts is itself right."""
    plain = PlainCache({0: [1], 1: [2], 2: [3]})
    plain.reorder([0, 1, 2], [2, 0, 0])
    assert plain.sequences == {0: [3], 1: [1], 2: [1]}
