"""Progressive reading and selection, on every backend, against the rules of docs/transitions.md in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import FINEST_DTYPE, TILE_COLUMNS, attend
from reference import Stored, progressive_attention, relative_error

import hybridkv

DIM, GROUP, HKV = 64, 4, 2


def peaked(length: int, n_new: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and n_new q whose weights differ by orders of magnitude between blocks, as in real text; float16 values."""
    torch.manual_seed(length)
    q = torch.randn(1, HKV * GROUP, DIM) + 0.4 * torch.randn(n_new, HKV * GROUP, DIM)
    k, v = torch.randn(2, length, HKV, DIM)
    direction = q[0].view(HKV, GROUP, DIM).mean(1)
    strength = torch.linspace(-1.5, 1.5, length // 64 + 1)[torch.randperm(length // 64 + 1)]
    k += strength.repeat_interleave(64)[:length, None, None] * direction * 2.5
    return q.half().float(), k.half().float(), v.half().float()


def typed(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in the finest dtype of the device; exact, as their values are float16's."""
    return [x.to(getattr(torch, FINEST_DTYPE[device.partition(":")[0]])) for x in tensors]


def build(device: str, bits: int, k: torch.Tensor, v: torch.Tensor, **fields: Any) -> tuple[hybridkv.Cache, Any]:
    config = hybridkv.HybridConfig(quantization_bits=bits, **fields)
    cache = hybridkv.Cache(
        config,
        num_layers=1,
        num_kv_heads=HKV,
        head_dim=DIM,
        dtype=FINEST_DTYPE[device],
        device=device,
        max_tokens=8192,
        max_sequences=2,
    )
    sequence = cache.add_sequence()
    with cache.step([sequence], [len(k)]) as step:
        attend(device, step, 0, *typed(device, torch.zeros(len(k), HKV, DIM), k, v))
    return cache, sequence


def decode(cache: hybridkv.Cache, sequence: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """The output of one more step."""
    with cache.step([sequence], [len(tensors[1])]) as step:
        return attend(cache.device, step, 0, *typed(cache.device, *tensors))  # type: ignore[no-any-return]


def stored_at(bits: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache of `bits` holds of k and v, read back; records are the same bytes on every device."""
    cache, sequence = build("cpu", bits, k, v)
    return tuple(torch.as_tensor(x).double() for x in cache.read_tokens(sequence, 0, 0, len(k)))  # type: ignore[return-value]


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("thresholds", [(0.0, 0.0), (1e-3, 0.05), (0.02, 0.3), (0.0, 0.1), (0.05, 0.0)])
@pytest.mark.parametrize("n_new", [1, 5])
def test_progressive_reading(backend: str, bits: int, thresholds: tuple[float, float], n_new: int) -> None:
    """One token, and five drafts: 20 query columns, more than one tile where there are tiles."""
    skip, refine = thresholds
    q, k, v = peaked(1500, n_new)
    old, new = slice(0, -n_new), slice(-n_new, None)
    cache, sequence = build(backend, bits, k[old], v[old], skip_mass=skip, refine_mass=refine)
    before = cache.stats().counters
    out = decode(cache, sequence, q, k[new], v[new])
    after = cache.stats().counters
    stored = Stored(
        (k[old], v[old]), stored_at(bits, k[old], v[old]), stored_at(4, k[old], v[old]), hot_blocks=[0, 22, 23]
    )
    # Where nothing is judged, CUDA reads a record for 16 columns at a time.
    tile = 16 if backend == "cuda" and not any(thresholds) else TILE_COLUMNS[backend]
    want, counts = progressive_attention(q, (k[new], v[new]), stored, skip, refine, tile)
    assert after["n_records_read"] - before["n_records_read"] == counts["read"]
    assert after["n_records_skipped"] - before["n_records_skipped"] == counts["skipped"]
    if bits != 4:
        assert after["n_records_refined"] - before["n_records_refined"] == counts["refined"]
    if thresholds == (1e-3, 0.05):
        assert counts["skipped"] > 0, "the data must exercise all three cases"
        assert 0 < counts["refined"] < counts["read"], "the data must exercise all three cases"
    assert relative_error(out, want) < 2e-3
    assert (after["skipped_mass"] > before["skipped_mass"]) == (counts["skipped"] > 0)


@pytest.mark.parametrize("top_k", [1, 3, 8, 1000])
def test_selection_takes_the_largest_bounds(backend: str, top_k: int) -> None:
    """Half of the budget by bound, half by history; with no history that is the largest bounds."""
    q, k, v = peaked(1500)
    cache, sequence = build(backend, 8, k[:-1], v[:-1], skip_mass=0.0, refine_mass=0.0, sparse_top_k=top_k)
    n_blocks = 23
    cold = range(1, 22)
    for head in range(HKV):
        for block in cold:
            cache.set_tier(sequence, 0, head, block, "L2")
        assert cache.tiers(sequence, 0, head)[1] == "L2"
    before = cache.stats().counters["n_records_unselected"]
    out = decode(cache, sequence, q, k[-1:], v[-1:])
    assert cache.stats().counters["n_records_unselected"] - before == HKV * max(0, len(cold) - top_k)
    low_k, low_v = stored_at(4, k[:-1], v[:-1])
    want = torch.zeros(HKV * GROUP, DIM, dtype=torch.float64)
    for head in range(HKV):
        heads = q[0, head * GROUP : (head + 1) * GROUP].double()
        bounds = []
        for block in cold:
            part = k[block * 64 : (block + 1) * 64, head].double()
            bounds.append((torch.maximum(heads * part.amin(0), heads * part.amax(0)).sum(-1)).max())
        chosen = [cold[i] for i in torch.tensor(bounds).argsort(descending=True, stable=True)[:top_k]]
        keys = [k[-1:, head].double()]
        values = [v[-1:, head].double()]
        for block in range(n_blocks + 1):
            part = slice(block * 64, min(len(k) - 1, (block + 1) * 64))
            if block in chosen:
                keys.append(low_k[part, head])
                values.append(low_v[part, head])
            elif block not in cold:
                keys.append(k[part, head].double())
                values.append(v[part, head].double())
        weights = torch.softmax(heads @ torch.cat(keys).T / 8, dim=-1)
        want[head * GROUP : (head + 1) * GROUP] = weights @ torch.cat(values)
    assert relative_error(out[0], want) < 5e-3


def test_back_in_l1_has_full_precision(backend: str) -> None:
    """Demotion and promotion move no bytes: the record reads exactly as if nothing had happened."""
    q, k, v = peaked(800)
    cache, sequence = build(backend, 8, k[:-1], v[:-1], skip_mass=0.0, refine_mass=0.0)
    outs = {}
    for tier in ("L2", "L1", None):  # CUDA reads with another kernel once there has been an L2
        fork = cache.fork(sequence)
        if tier:
            for head in range(HKV):
                for block in range(1, 11):
                    cache.set_tier(fork, 0, head, block, tier)
        outs[tier] = decode(cache, fork, q, k[-1:], v[-1:])
        cache.free(fork)
    assert not torch.equal(outs["L2"], outs[None])
    assert torch.equal(outs["L1"], outs[None])
