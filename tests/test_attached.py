"""Attached mode under an engine that shares, frees, rewrites, copies and wipes blocks (tests/engine.py)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from devices import attend, to_device
from engine import Engine
from reference import LENGTHS, attention, relative_error

import hybridkv

BITS = [0, 4, 8]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("start", range(58, 68))
def test_rejected_drafts_across_a_block_boundary(device: str, bits: int, start: int) -> None:
    """Every pattern of accepted drafts in two rounds of 1 + 4 tokens and a last token, a row of the batch each."""
    patterns = list(itertools.product(range(5), repeat=2))
    engine = Engine(
        device=device,
        bits=bits,
        layers=1,
        kv_heads=1,
        q_heads=1,
        n_blocks=3 * len(patterns) + 1,
        max_rows=len(patterns),
    )
    names = [engine.add() for _ in patterns]
    assert engine.step({name: (list(range(start)), start) for name in names})
    for round_ in range(2):
        drafts = [round_ * 10 + i for i in range(5)]
        assert engine.step(
            {name: (drafts, 1 + accepted[round_]) for name, accepted in zip(names, patterns, strict=True)}
        )
    assert engine.step({name: ([99], 1) for name in names})


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("hot_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("chunk", [7, 64, 200])
def test_growth_in_chunks(device: str, bits: int, hot_tokens: int, chunk: int) -> None:
    engine = Engine(device=device, bits=bits, hot_tokens=hot_tokens, layers=1, n_blocks=8, max_rows=1)
    name = engine.add()
    for start in range(0, 330, chunk):
        n = min(chunk, 330 - start)
        assert engine.step({name: (list(range(start, start + n)), n)})


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_every_length_then_decode(device: str, bits: int, length: int) -> None:
    engine = Engine(device=device, bits=bits, n_blocks=8, max_rows=1)
    name = engine.add()
    assert engine.step({name: (list(range(length)), length)}, padding=2 if engine.store.max_rows > 2 else 0)
    for token in range(3):
        assert engine.step({name: ([token], 1)})


@pytest.mark.parametrize("n", [1, 3])
def test_tokens_of_padding_rows_see_nothing(device: str, n: int) -> None:
    """Rows of length 0 that have tokens, as graphs of a fixed shape do: zeros, and the rows beside them are right."""
    torch.manual_seed(0)
    store = hybridkv.Store(
        num_layers=1,
        num_kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
        num_blocks=8,
        max_rows=4,
        max_new_tokens=64,
        device=device,
    )
    store.bind_layer(0, torch.zeros(8, 2, store.record_bytes, dtype=torch.uint8, device=device))
    q, k, v = (torch.randn(4 * n, heads, 64).bfloat16() for heads in (8, 2, 2))
    lengths = torch.tensor([0, n, 0, n], dtype=torch.int32)
    table = torch.tensor([[0], [1], [0], [2]], dtype=torch.int32)
    slots = torch.tensor([block * 64 + i if block else -1 for block in (0, 1, 0, 2) for i in range(n)])
    cu = torch.arange(0, 4 * n + 1, n, dtype=torch.int32)
    clock = torch.tensor([5]) if device != "cpu" else 5
    store.begin(*(to_device(x, device) for x in (cu, lengths, table, slots)), clock=to_device(clock, device))
    out, lse = attend(device, store, 0, q, k, v, return_lse=True)
    for row, length in enumerate(lengths):
        part = slice(row * n, (row + 1) * n)
        if length == 0:
            assert (out[part] == 0).all()
            assert (lse[part] == -torch.inf).all()
        else:
            wanted, _ = attention(q[part], k[part], v[part])
            assert relative_error(out[part], wanted) < 6e-3


def test_case_5_padding_rows_and_empty_batches(device: str) -> None:
    """Rows without tokens give zeros and -inf; a batch of no rows works."""
    engine = Engine(device=device, bits=8, layers=1, q_heads=2, kv_heads=1, max_rows=4)
    empty = torch.zeros(0, dtype=torch.int32)
    engine.begin(torch.zeros(1, dtype=torch.int32), empty, torch.zeros(0, 1, dtype=torch.int32), empty.long())
    attend(device, engine.store, 0, torch.empty(0, 2, 32).bfloat16(), *[torch.empty(0, 1, 32).bfloat16()] * 2)
    lengths = torch.tensor([0, 70, 0, 1], dtype=torch.int32)
    table = torch.tensor([[0, 0], [3, 4], [0, 0], [5, 0]], dtype=torch.int32)
    slots = torch.cat([torch.arange(70) + 3 * 64, torch.tensor([5 * 64])])
    engine.begin(torch.tensor([0, 0, 70, 70, 71], dtype=torch.int32), lengths, table, slots)
    q, kv = torch.randn(71, 2, 32).bfloat16(), torch.randn(71, 1, 32).bfloat16()
    lse = torch.full((71, 2), float("nan"))
    out = torch.full_like(q, float("nan"))
    attend(device, engine.store, 0, q, kv, kv, out=out, lse=lse)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def collect_outputs(engine: Engine) -> list[torch.Tensor]:
    """A list that receives every output of the engine's steps."""
    outs: list[torch.Tensor] = []
    check = engine.check

    def collect(*args: Any) -> None:
        outs.append(args[-1].clone())
        check(*args)

    engine.check = collect  # type: ignore[method-assign]
    return outs


@pytest.mark.parametrize("bits", BITS)
def test_case_3_poison_never_shows(device: str, bits: int) -> None:
    """Outputs on poisoned pages equal those on zeroed ones, bit for bit."""
    outs = []
    for fill in (0xFF, 0x00, 0x7E):
        torch.manual_seed(0)
        engine = Engine(device=device, bits=bits, layers=1, max_rows=2)
        engine.pages.fill_(fill)
        collected = collect_outputs(engine)
        first, second = engine.add(), engine.add()
        assert engine.step({first: (list(range(13)), 13), second: (list(range(65)), 65)})
        assert engine.step({first: ([1], 1), second: ([2], 1)})
        outs.append(collected)
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


def test_case_1_blocks_beyond_two_gigabytes(device: str) -> None:
    """The same data in the lowest and in the highest blocks of a pool of more than 2^31 bytes."""
    outs = []
    n_blocks = 33000
    for high in (False, True):
        torch.manual_seed(0)
        config = hybridkv.HybridConfig(quantization_bits=8)
        store = hybridkv.Store(
            config,
            num_layers=1,
            num_kv_heads=4,
            head_dim=128,
            dtype="bfloat16",
            device=device,
            num_blocks=n_blocks,
            max_rows=1,
            max_new_tokens=256,
        )
        shape = (n_blocks, 4, store.record_bytes)
        pages = torch.empty(shape, dtype=torch.uint8, device=device)  # untouched pages take no host memory
        assert pages.numel() > 2**31
        store.bind_layer(0, pages)
        blocks = [n_blocks - 1, n_blocks - 2, n_blocks - 3] if high else [1, 2, 3]
        table = torch.tensor([blocks], dtype=torch.int32)
        for first, n in ((0, 130), (130, 1)):
            slots = torch.tensor([blocks[p // 64] * 64 + p % 64 for p in range(first, first + n)])
            lengths = torch.tensor([0, n], dtype=torch.int32), torch.tensor([first + n], dtype=torch.int32)
            store.begin(*(to_device(x, device) for x in (*lengths, table, slots)))
            q = torch.randn(n, 8, 128).bfloat16()
            k, v = torch.randn(2, n, 4, 128).bfloat16()
            outs.append(attend(device, store, 0, q, k, v))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


def test_case_9_padded_and_strided_pages(device: str) -> None:
    """Pages handed over with gaps between blocks and heads: the gaps are never touched."""
    engine = Engine(device=device, bits=8, layers=1, kv_heads=2, n_blocks=8)
    record = engine.store.record_bytes
    memory = torch.full((8, 3, record + 48), 0xA5, dtype=torch.uint8, device=device)
    engine.store.bind_layer(0, memory[:, :2, :record])
    name = engine.add()
    assert engine.step({name: (list(range(300)), 300)})
    for token in range(70):
        assert engine.step({name: ([token], 1)})
    gaps = memory.clone()
    gaps[:, :2, :record] = 0xA5
    assert torch.equal(gaps, torch.full_like(gaps, 0xA5))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n_hot_pages", [0, 6])
def test_hostile_engine(device: str, bits: int, seed: int, n_hot_pages: int) -> None:
    """Everything at once, at random, with pools small enough to run out."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    engine = Engine(
        device=device,
        bits=bits,
        n_blocks=24,
        max_rows=4,
        n_hot_pages=n_hot_pages,
        seed=seed,
        hot_tokens=16,
        sink_blocks=seed % 2,
    )
    for _ in range(150):
        names = sorted(engine.sequences)
        action = rng.choice(["add", "step", "step", "step", "step", "share", "copy", "preempt", "drop", "dummy"])
        if action == "add" and len(names) < 8:
            name = engine.add()
            n = rng.choice(LENGTHS[1:])
            if not engine.step({name: ([rng.randrange(9) for _ in range(n)], n)}):
                engine.drop(name)
        elif action == "step" and names:
            chosen = rng.sample(names, min(len(names), rng.randint(1, 3)))
            work = {}
            for name in chosen:
                n = rng.choice([1, 1, 1, 5, 5, 20, 64])
                work[name] = ([rng.randrange(9) for _ in range(n)], rng.randint(1, n) if n == 5 else n)
            if not engine.step(work, padding=rng.randint(0, 4 - len(chosen))):
                engine.preempt(rng.choice(names))
        elif action == "share" and names:
            engine.share(rng.choice(names))
        elif action == "copy" and names:
            engine.copy(rng.choice(names))
        elif action == "preempt" and names:
            engine.preempt(rng.choice(names))
        elif action == "drop" and len(names) > 2:
            engine.drop(rng.choice(names))
        elif action == "dummy":
            engine.dummy_step(rng.randint(1, 3))


def test_case_10_preempted_and_resumed(device: str) -> None:
    """A pool of 7 blocks, two sequences of 130 tokens: the one that was thrown out comes back with the same content."""
    engine = Engine(device=device, bits=8, n_blocks=8, max_rows=2)
    first, second = engine.add(), engine.add()
    assert engine.step({first: (list(range(130)), 130), second: (list(range(50, 180)), 130)})
    for token in range(61):
        assert engine.step({second: ([token], 1)})
    assert engine.step({second: ([1] * 10, 10)})
    assert not engine.step({first: (list(range(70)), 70)})
    engine.preempt(first)
    engine.preempt(second)
    assert engine.step({first: (list(range(70)), 70)})
    assert engine.step({first: ([5], 1)})


def test_repeated_begin_changes_nothing(device: str) -> None:
    """Builders may run several times a step."""
    engine = Engine(device=device, bits=8, layers=1, max_rows=1)
    original = engine.begin
    engine.begin = lambda *args: (original(*args), original(*args))  # type: ignore[method-assign]
    name = engine.add()
    for n in (100, 1, 1, 30, 5, 64):
        assert engine.step({name: (list(range(n)), n)})


@pytest.mark.parametrize("bits", BITS)
def test_blocks_of_a_batch_mate(device: str, bits: int) -> None:
    """A row may read a block that another row of the same batch is just writing."""
    engine = Engine(device=device, bits=bits, max_rows=2)
    first = engine.add()
    assert engine.step({first: (list(range(40)), 40)})
    sequence = engine.sequences[first]
    new = list(range(40, 128))
    while len(sequence.blocks) < 2:
        sequence.blocks.append(engine.allocate())
    second = engine.add()
    engine.sequences[second].tokens = list(range(128))
    engine.sequences[second].blocks = [*sequence.blocks, engine.allocate()]
    sequence.tokens += new
    engine.run([(sequence, new, 40), (engine.sequences[second], [7, 8, 9], 128)], padding=0)
