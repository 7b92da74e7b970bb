"""Attention of a managed cache against double precision, on every backend of this machine."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from devices import FINEST_DTYPE, attend, require, to_host
from reference import LENGTHS, allowed_error, attention, relative_error

import hybridkv

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def exact_config(bits: int, **fields: Any) -> hybridkv.HybridConfig:
    """Progressive reading off: every record is read in full."""
    return hybridkv.HybridConfig(quantization_bits=bits, **{"skip_mass": 0.0, "refine_mass": 0.0, **fields})


def make_cache(
    config: hybridkv.HybridConfig, *, hkv: int, dim: int, dtype: str, device: str, rows: int = 1, **options: Any
) -> hybridkv.Cache:
    require(device, dtype=dtype, block_size=config.block_size)
    defaults = {"num_layers": 1, "max_tokens": rows * 1024, "max_sequences": rows, "prefix_reuse": False}
    return hybridkv.Cache(config, num_kv_heads=hkv, head_dim=dim, dtype=dtype, device=device, **{**defaults, **options})


def append(cache: hybridkv.Cache, sequence: Any, k: torch.Tensor, v: torch.Tensor, chunk: int) -> None:
    """Bring K and V in, `chunk` tokens a step; outputs are not looked at."""
    for start in range(0, len(k), chunk):
        part = slice(start, start + chunk)
        with cache.step([sequence], [len(k[part])]) as step:
            attend(cache.device, step, 0, torch.zeros_like(k[part]), k[part].contiguous(), v[part].contiguous())


def attend_and_check(
    cache: hybridkv.Cache,
    sequence: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int = 0,
    **options: Any,
) -> None:
    """Attend the tokens k, v on top of what `sequence` has; compare with double precision on the stored values.

    In a layer with a window those may be gone after the step, so they are read before it; a block that turns cold in
    the step itself then differs by its quantisation.
    """
    context = sequence.length
    first = max(0, context - window + 1) if window else 0
    stored = cache.read_tokens(sequence, 0, first, context)
    lse = torch.full(q.shape[:2], math.nan)
    out = torch.full_like(q, math.nan)
    with cache.step([sequence], [len(q)]) as step:
        attend(cache.device, step, 0, q, k, v, out=out, lse=lse, **options)
    if not window:
        stored = cache.read_tokens(sequence, 0, first, context)
    k_all, v_all = (torch.cat([to_host(x), y]) for x, y in zip(stored, (k, v), strict=True))
    plain = {"scale": options.get("scale"), "soft_cap": options.get("soft_cap", 0.0), "sinks": options.get("sinks")}
    want, want_lse = attention(q, k_all, v_all, window=window, **plain)
    turned_cold = 0.012 if window and cache.config.quantization_bits else 0.0
    score_size = (options.get("scale") or 0.0) * math.sqrt(q.shape[-1])
    assert out.isfinite().all()
    assert relative_error(out, want) <= allowed_error(q, k_all, v_all, want, window=window, **plain) + turned_cold
    # read_tokens rounds what is stored to the model's dtype, which moves scores by up to that much
    assert (lse.double() - want_lse).abs().max() <= 5e-3 * max(1.0, score_size) + turned_cold


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n_new", [1, 3])
def test_decode_at_every_length(backend: str, bits: int, dtype: str, n_new: int) -> None:
    torch.manual_seed(bits)
    for length in LENGTHS:
        cache = make_cache(exact_config(bits), hkv=2, dim=64, dtype=dtype, device=backend)
        sequence = cache.add_sequence()
        k, v = torch.randn(2, length + n_new, 2, 64).to(DTYPES[dtype])
        append(cache, sequence, k[:length], v[:length], chunk=50)
        attend_and_check(cache, sequence, torch.randn(n_new, 8, 64).to(DTYPES[dtype]), k[length:], v[length:])


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_prefill_at_every_length(backend: str, bits: int) -> None:
    torch.manual_seed(bits)
    for context in [0, 33, 64, 161]:
        for length in [9, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161, 300]:
            cache = make_cache(exact_config(bits), hkv=2, dim=64, dtype="bfloat16", device=backend)
            sequence = cache.add_sequence()
            k, v = torch.randn(2, context + length, 2, 64).to(torch.bfloat16)
            append(cache, sequence, k[:context], v[:context], chunk=40)
            attend_and_check(cache, sequence, torch.randn(length, 4, 64).to(torch.bfloat16), k[context:], v[context:])


@pytest.mark.parametrize("heads", [(71, 1), (28, 4), (40, 8), (24, 4), (64, 4), (9, 3), (1, 1), (32, 32)])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_case_16_head_counts(backend: str, heads: tuple[int, int], dtype: str) -> None:
    torch.manual_seed(0)
    hq, hkv = heads
    cache = make_cache(exact_config(8), hkv=hkv, dim=32, dtype=dtype, device=backend)
    sequence = cache.add_sequence()
    k, v = torch.randn(2, 150, hkv, 32).to(DTYPES[dtype])
    append(cache, sequence, k[:130], v[:130], chunk=130)
    attend_and_check(cache, sequence, torch.randn(1, hq, 32).to(DTYPES[dtype]), k[130:131], v[130:131])
    attend_and_check(cache, sequence, torch.randn(19, hq, 32).to(DTYPES[dtype]), k[131:], v[131:])


@pytest.mark.parametrize("dim", range(16, 257, 16))
@pytest.mark.parametrize("bits", [0, 4, 6, 8])
def test_case_17_head_sizes(backend: str, dim: int, bits: int) -> None:
    torch.manual_seed(dim)
    cache = make_cache(exact_config(bits), hkv=1, dim=dim, dtype="bfloat16", device=backend)
    sequence = cache.add_sequence()
    k, v = torch.randn(2, 180, 1, dim).to(torch.bfloat16)
    append(cache, sequence, k[:161], v[:161], chunk=70)
    attend_and_check(cache, sequence, torch.randn(2, 5, dim).to(torch.bfloat16), k[161:163], v[161:163])
    attend_and_check(cache, sequence, torch.randn(17, 5, dim).to(torch.bfloat16), k[163:], v[163:])


@pytest.mark.parametrize("block_size", [8, 16, 24, 64, 72, 128, 512])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_block_sizes(backend: str, block_size: int, bits: int) -> None:
    torch.manual_seed(block_size)
    with pytest.warns(UserWarning, match="block_size") if block_size != 64 else nullcontext():
        config = exact_config(bits, block_size=block_size)
        cache = make_cache(config, hkv=2, dim=48, dtype="bfloat16", device=backend, max_tokens=4096)
    sequence = cache.add_sequence()
    k, v = torch.randn(2, 700, 2, 48).to(torch.bfloat16)
    append(cache, sequence, k[:600], v[:600], chunk=130)
    attend_and_check(cache, sequence, torch.randn(1, 4, 48).to(torch.bfloat16), k[600:601], v[600:601])
    attend_and_check(cache, sequence, torch.randn(99, 4, 48).to(torch.bfloat16), k[601:], v[601:])


@pytest.mark.parametrize("options", [{"scale": 0.5}, {"soft_cap": 5.0}, {"sinks": torch.tensor([0.5, -3.0, 2.0, 9.0])}])
@pytest.mark.parametrize("n_new", [1, 30])
def test_options(backend: str, options: dict[str, Any], n_new: int) -> None:
    torch.manual_seed(1)
    cache = make_cache(exact_config(8), hkv=2, dim=64, dtype="bfloat16", device=backend)
    sequence = cache.add_sequence()
    k, v = torch.randn(2, 230, 2, 64).to(torch.bfloat16)
    append(cache, sequence, k[:200], v[:200], chunk=200)
    attend_and_check(
        cache,
        sequence,
        torch.randn(n_new, 4, 64).to(torch.bfloat16),
        k[200 : 200 + n_new],
        v[200 : 200 + n_new],
        **options,
    )


@pytest.mark.parametrize("window", [8, 64, 100])
@pytest.mark.parametrize("bits", [0, 8])
def test_case_19_sliding_window(backend: str, window: int, bits: int) -> None:
    torch.manual_seed(window)
    for length in [window - 1, window, window + 1, window + 2, 3 * window]:
        cache = make_cache(exact_config(bits), hkv=1, dim=32, dtype="bfloat16", device=backend, layer_windows=[window])
        sequence = cache.add_sequence()
        k, v = torch.randn(2, length + 2 * window + 1, 1, 32).to(torch.bfloat16)
        append(cache, sequence, k[:length], v[:length], chunk=33)
        attend_and_check(
            cache,
            sequence,
            torch.randn(1, 2, 32).to(torch.bfloat16),
            k[length : length + 1],
            v[length : length + 1],
            window,
        )
        attend_and_check(
            cache, sequence, torch.randn(2 * window, 2, 32).to(torch.bfloat16), k[length + 1 :], v[length + 1 :], window
        )
        cache.check()


def test_case_4_uniform_weights_give_the_constant(backend: str) -> None:
    """q = 0 and V = c: the output is c at every length and in every mix of tiers."""
    for bits in (0, 4, 8):
        for length in LENGTHS[1:]:
            cache = make_cache(exact_config(bits), hkv=1, dim=64, dtype="bfloat16", device=backend)
            sequence = cache.add_sequence()
            k = torch.randn(length, 1, 64).to(torch.bfloat16)
            v = torch.full((length, 1, 64), 1.5).to(torch.bfloat16)
            append(cache, sequence, k[:-1], v[:-1], chunk=64)
            with cache.step([sequence], [1]) as step:
                out = attend(backend, step, 0, torch.zeros(1, 4, 64).to(torch.bfloat16), k[-1:], v[-1:])
            assert torch.equal(out.float(), torch.full((1, 4, 64), 1.5)), (bits, length)


def test_small_values_under_a_sink(backend: str) -> None:
    """sigma_V = 0.02 and one key 12 nats above the rest: small weights must not vanish."""
    torch.manual_seed(3)
    cache = make_cache(exact_config(8), hkv=1, dim=128, dtype="bfloat16", device=backend, max_tokens=8192)
    sequence = cache.add_sequence()
    q = torch.randn(1, 4, 128).to(torch.bfloat16)
    k = torch.randn(4097, 1, 128).to(torch.bfloat16)
    v = (0.02 * torch.randn(4097, 1, 128)).to(torch.bfloat16)
    direction = q[0].float().mean(0)
    k[0, 0] = (direction * (12.0 * math.sqrt(128) / (q[0].float() @ direction).mean())).to(torch.bfloat16)
    append(cache, sequence, k[:-1], v[:-1], chunk=4096)
    attend_and_check(cache, sequence, q, k[-1:], v[-1:])


def test_case_7_outlier_key_channels(backend: str) -> None:
    """Two key channels at 200 +- 0.5: the common offset must not eat the differences."""
    torch.manual_seed(4)
    cache = make_cache(exact_config(8), hkv=1, dim=128, dtype="float16", device=backend, max_tokens=4096)
    sequence = cache.add_sequence()
    k, v = torch.randn(2, 2050, 1, 128)
    k[:, 0, [3, 77]] = 200 + torch.rand(2050, 2) - 0.5
    q = torch.randn(1, 4, 128)
    q[..., [3, 77]] = torch.tensor([4.0, -4.0])
    q, k, v = (x.half() for x in (q, k, v))
    append(cache, sequence, k[:2040], v[:2040], chunk=2040)
    attend_and_check(cache, sequence, q, k[2040:2041], v[2040:2041])
    attend_and_check(cache, sequence, torch.cat([q] * 9), k[2041:], v[2041:])


def test_case_15_huge_and_nonfinite_values(backend: str) -> None:
    """One bad token does not poison its block, and stays in its head and sequence."""
    torch.manual_seed(5)
    for bad in (1e5, 3e38, math.inf, -math.inf, math.nan):
        cache = make_cache(exact_config(8), hkv=2, dim=32, dtype="bfloat16", device=backend, rows=2)
        first, second = cache.add_sequence(), cache.add_sequence()
        k, v = torch.randn(2, 200, 2, 32).to(torch.bfloat16)
        bad_v = v.clone()
        bad_v[70, 0, 3] = bad
        append(cache, first, k, bad_v, chunk=200)
        append(cache, second, k, v, chunk=200)
        stored = to_host(cache.read_tokens(first, 0, 64, 128)[1]).float()
        clean = to_host(cache.read_tokens(second, 0, 64, 128)[1]).float()
        assert stored.isfinite().all()
        untouched = torch.ones(64, dtype=torch.bool)
        untouched[6] = False
        assert torch.equal(stored[untouched], clean[untouched])
        assert (stored[6, 0] - clean[6, 0]).abs()[torch.arange(32) != 3].max() < 0.1
        assert cache.stats().counters["n_nonfinite_inputs"] == 1
        q = torch.randn(2, 4, 32).to(torch.bfloat16)
        with cache.step([first, second], [1, 1]) as step:
            out = attend(backend, step, 0, q, k[:2], v[:2])
        assert out.isfinite().all()


def test_results_do_not_depend_on_threads(backend: str) -> None:
    torch.manual_seed(6)
    outs = []
    k, v = torch.randn(2, 3001, 2, 64).to(torch.bfloat16)
    q = torch.randn(1, 8, 64).to(torch.bfloat16)
    before = hybridkv.get_num_threads()
    try:
        for threads in (1, 2, 5):
            hybridkv.set_num_threads(threads)
            cache = make_cache(
                hybridkv.HybridConfig(), hkv=2, dim=64, dtype="bfloat16", device=backend, max_tokens=4096
            )
            sequence = cache.add_sequence()
            append(cache, sequence, k[:-1], v[:-1], chunk=1000)
            with cache.step([sequence], [1]) as step:
                outs.append(attend(cache.device, step, 0, q, k[-1:], v[-1:]))
    finally:
        hybridkv.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_case_18_rows_do_not_see_each_other(backend: str) -> None:
    """A row in a batch equals the same row alone: bit for bit on the CPU; CUDA cuts work by the whole batch."""
    torch.manual_seed(7)
    lengths = [130, 70, 33]
    data = [torch.randn(2, n + 40, 2, 64).to(torch.bfloat16) for n in lengths]
    q = torch.randn(40, 3, 4, 64).to(torch.bfloat16)
    batch = make_cache(exact_config(8), hkv=2, dim=64, dtype="bfloat16", device=backend, rows=3)
    together = [batch.add_sequence() for _ in lengths]
    alone = [make_cache(exact_config(8), hkv=2, dim=64, dtype="bfloat16", device=backend) for _ in lengths]
    single = [cache.add_sequence() for cache in alone]
    for row, n in enumerate(lengths):
        append(batch, together[row], data[row][0, :n], data[row][1, :n], chunk=n)
        append(alone[row], single[row], data[row][0, :n], data[row][1, :n], chunk=n)
    for t in range(40):
        rows = [row for row in range(3) if t < 10 or row != 0]
        new = [data[row][:, lengths[row] + t] for row in rows]
        with batch.step([together[row] for row in rows], [1] * len(rows)) as step:
            k, v = (torch.stack([x[i] for x in new]) for i in (0, 1))
            out = attend(backend, step, 0, q[t, rows], k, v)
        for i, row in enumerate(rows):
            with alone[row].step([single[row]], [1]) as step:
                want = attend(backend, step, 0, q[t, row : row + 1], new[i][0][None], new[i][1][None])
            if backend == "cpu":
                assert torch.equal(out[i], want[0])
            assert relative_error(out[i], want[0]) < 3e-3


def test_mass_adds_up(backend: str) -> None:
    """The mass per block is the share of the softmax, largest over a group's heads."""
    torch.manual_seed(8)
    dtype = FINEST_DTYPE[backend]
    cache = make_cache(exact_config(8), hkv=2, dim=64, dtype=dtype, device=backend)
    sequence = cache.add_sequence()
    k, v = torch.randn(2, 301, 2, 64).to(DTYPES[dtype])
    append(cache, sequence, k[:-1], v[:-1], chunk=300)
    q = torch.randn(1, 2, 64).to(DTYPES[dtype])
    mass = torch.full((1, 2, 5), math.nan)
    with cache.step([sequence], [1]) as step:
        attend(backend, step, 0, q, k[-1:], v[-1:], mass=mass)
    stored_k = torch.cat([to_host(cache.read_tokens(sequence, 0, 0, 300)[0]), k[-1:]])
    weights = torch.softmax(torch.einsum("hd,shd->hs", q[0].float(), stored_k.float()) / 8, dim=-1)
    want = torch.stack([weights[:, b * 64 : (b + 1) * 64].sum(-1) for b in range(5)], dim=-1)
    assert torch.allclose(mass[0], want, atol=2e-4)
    assert torch.allclose(mass.sum(-1), torch.ones(1, 2), atol=1e-3)
