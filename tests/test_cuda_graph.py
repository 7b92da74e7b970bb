"""Decode steps in CUDA graphs: captured once, replayed while sequences come and go, against the CPU on the same data.

HYBRIDKV_SOAK_STEPS sets the number of steps; a soak has 10,000.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from devices import attend
from gpu import MEMORY, capture, host_of, needs_device, needs_gpu, place, shared
from reference import KvTable, relative_error

import hybridkv

STEPS = int(os.environ.get("HYBRIDKV_SOAK_STEPS", "300"))
ROWS, LAYERS, Q_HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 2, 64, 64
WINDOWS = [None, 100]
# Both round their output to bfloat16; a wrong token moves it by much more.
ALLOWED = 6e-3
CONFIG = {"skip_mass": 0.0, "refine_mass": 0.0}

DEVICES = ("cpu", "cuda:0")

pytestmark = [needs_device, pytest.mark.filterwarnings("ignore:quantization_bits 0")]


def static(*shape: int) -> torch.Tensor:
    """A tensor on the GPU that keeps its address over all replays."""
    return torch.zeros(*shape, dtype=torch.bfloat16, device=MEMORY)


def attend_on_gpu(step: Any, layer: int, *tensors: torch.Tensor) -> torch.Tensor:
    """`attend` with tensors of the host; the output on the host."""
    out = place(torch.full_like(tensors[0], float("nan")))
    step.attend(layer, *(place(x) for x in tensors), out=out)
    return host_of(out)


class DecodeBuffers:
    """What a captured decode step of `ROWS` tokens reads and writes."""

    def __init__(self) -> None:
        self.q = [static(ROWS, Q_HEADS, DIM) for _ in range(LAYERS)]
        self.k = [static(ROWS, KV_HEADS, DIM) for _ in range(LAYERS)]
        self.v = [static(ROWS, KV_HEADS, DIM) for _ in range(LAYERS)]
        self.out = [static(ROWS, Q_HEADS, DIM) for _ in range(LAYERS)]

    def fill(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Bring in n <= ROWS tokens; poison the outputs and what lies behind them."""
        for target, x in ((self.q, q), (self.k, k), (self.v, v)):
            target[layer].fill_(float("nan"))
            target[layer][: len(x)].copy_(x)
        self.out[layer].fill_(float("nan"))

    def attend(self, step: Any) -> None:
        for layer in range(LAYERS):
            tensors = [shared(x[layer]) for x in (self.q, self.k, self.v)]
            step.attend(layer, *tensors, out=shared(self.out[layer]))

    def results(self, n: int) -> list[torch.Tensor]:
        return [out[:n].cpu() for out in self.out]


@dataclass
class Row:
    """A sequence in both caches, and its tokens."""

    handles: tuple[Any, Any]
    tokens: list[int] = field(default_factory=list)


class Managed:
    """A cache on the CPU and one on the GPU that get the same steps; decode steps of the GPU are replays."""

    def __init__(self, bits: int) -> None:
        config = hybridkv.HybridConfig(quantization_bits=bits, **CONFIG)
        self.caches = [
            hybridkv.Cache(
                config,
                num_layers=LAYERS,
                num_kv_heads=KV_HEADS,
                head_dim=DIM,
                dtype="bfloat16",
                device=where,
                max_tokens=ROWS * 700,
                max_sequences=ROWS,
                layer_windows=WINDOWS,
                prefix_reuse=False,
            )
            for where in DEVICES
        ]
        self.table = KvTable(LAYERS, KV_HEADS, DIM, torch.bfloat16)
        self.buffers = DecodeBuffers()
        self.graph: Any = None

    def inputs(self, layer: int, rows: list[Row], new: list[list[int]]) -> tuple[torch.Tensor, ...]:
        kv = [self.table(layer, tokens, len(row.tokens)) for row, tokens in zip(rows, new, strict=True)]
        k, v = (torch.cat([pair[i] for pair in kv]) for i in (0, 1))
        return torch.randn(len(k), Q_HEADS, DIM).bfloat16(), k, v

    def step(self, rows: list[Row], new: list[list[int]]) -> None:
        """The same step on both; equal outputs."""
        counts = [len(tokens) for tokens in new]
        inputs = [self.inputs(layer, rows, new) for layer in range(LAYERS)]
        wanted = []
        with self.caches[0].step([row.handles[0] for row in rows], counts) as step:
            wanted = [attend("cpu", step, layer, *inputs[layer]) for layer in range(LAYERS)]
        with self.caches[1].step([row.handles[1] for row in rows], counts) as step:
            got = self.decode(step, inputs) if max(counts) == 1 else self.prefill(step, inputs)
        for row, tokens in zip(rows, new, strict=True):
            row.tokens += tokens
        for layer in range(LAYERS):
            assert relative_error(got[layer], wanted[layer]) < ALLOWED

    def prefill(self, step: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [attend_on_gpu(step, layer, *inputs[layer]) for layer in range(LAYERS)]

    def decode(self, step: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        n = len(inputs[0][0])
        for layer, x in enumerate(inputs):
            self.buffers.fill(layer, *x)
        if self.graph is None and n == ROWS:
            self.graph = capture(lambda: self.buffers.attend(step))
        if self.graph is None:
            return self.prefill(step, inputs)
        step.replay(self.graph)
        return self.buffers.results(n)

    def add(self, n: int, rng: random.Random) -> Row:
        row = Row((self.caches[0].add_sequence(), self.caches[1].add_sequence()))
        self.step([row], [[rng.randrange(99) for _ in range(n)]])
        return row

    def free(self, row: Row) -> None:
        for cache, handle in zip(self.caches, row.handles, strict=True):
            cache.free(handle)

    def truncate(self, row: Row, n: int) -> None:
        try:
            for cache, handle in zip(self.caches, row.handles, strict=True):
                cache.truncate(handle, n)
        except hybridkv.ArgumentError:  # the window has left it
            return
        del row.tokens[n:]

    def read_on_gpu(self, row: Row, layer: int, first: int) -> list[torch.Tensor]:
        kv = [static(len(row.tokens) - first, KV_HEADS, DIM) for _ in range(2)]
        arguments = (row.handles[1].id, layer, first, len(row.tokens) - first)
        self.caches[1]._core.read_tokens(*arguments, *(shared(x) for x in kv))
        return [x.cpu() for x in kv]

    def check_content(self, row: Row) -> None:
        """Records, hot pages, tiers: the same bits on both."""
        for layer in range(LAYERS):
            first = 0 if WINDOWS[layer] is None else max(0, len(row.tokens) - 90)
            on_cpu = self.caches[0].read_tokens(row.handles[0], layer, first)
            on_gpu = self.read_on_gpu(row, layer, first)
            assert all(torch.equal(a, b) for a, b in zip(on_cpu, on_gpu, strict=True))


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_managed_steps_replay(bits: int) -> None:
    """begin outside the graph; sequences are added, grow, are truncated, freed and replaced between its replays."""
    torch.manual_seed(bits)
    rng = random.Random(bits)
    pair = Managed(bits)
    rows = [pair.add(rng.randint(1, 200), rng) for _ in range(ROWS)]
    for i in range(STEPS):
        action = rng.random()
        if action < 0.04 and rows:
            pair.free(rows.pop(rng.randrange(len(rows))))
        elif action < 0.1 and len(rows) < ROWS:
            rows.append(pair.add(rng.choice([1, 5, 63, 64, 65, 130, 300]), rng))
        elif action < 0.12 and rows:
            row = rng.choice(rows)
            pair.truncate(row, rng.randint(0, len(row.tokens)))
        for row in [row for row in rows if len(row.tokens) > 600]:
            pair.free(row)
            rows.remove(row)
        chosen = rows if rng.random() < 0.6 else rng.sample(rows, rng.randint(0, len(rows)))
        if chosen:
            pair.step(chosen, [[rng.randrange(99)] for _ in chosen])
        if i % 50 == 49:
            for row in rows:
                pair.check_content(row)
            pair.caches[1].check()
    assert pair.graph is not None
    assert pair.caches[1].stats().counters["n_steps"] > STEPS / 2


class Attached:
    """Two stores on equal pages; begin and all attends of the GPU's decode steps are one graph."""

    def __init__(self, bits: int) -> None:
        self.n_blocks = ROWS * 10 + 1
        self.width = 10
        config = hybridkv.HybridConfig(quantization_bits=bits, **CONFIG)
        sizes = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "num_blocks": self.n_blocks}
        self.stores = [
            hybridkv.Store(
                config, **sizes, dtype="bfloat16", max_rows=ROWS, max_new_tokens=1024, device=where, num_hot_pages=0
            )
            for where in DEVICES
        ]
        shape = (LAYERS, self.n_blocks, KV_HEADS, self.stores[0].record_bytes)
        self.pages = [torch.full(shape, 0xFF, dtype=torch.uint8, device=where) for where in ("cpu", MEMORY)]
        for layer in range(LAYERS):
            self.stores[0].bind_layer(layer, self.pages[0][layer])
            self.stores[1].bind_layer(layer, shared(self.pages[1][layer]))
        self.table = KvTable(LAYERS, KV_HEADS, DIM, torch.bfloat16)
        self.buffers = DecodeBuffers()
        self.arrays = [x.to(MEMORY) for x in self.batch([None] * ROWS, [[]] * ROWS)]
        self.clock = torch.zeros(1, dtype=torch.int64, device=MEMORY)
        self.graph: Any = None

    def batch(self, rows: list[tuple[list[int], list[int]] | None], new: list[list[int]]) -> list[torch.Tensor]:
        """cu_new_tokens, seq_lens, block_table, slot_mapping of rows (tokens, blocks); a padding row has one token."""
        lengths, table, slots, counts = [], torch.zeros(len(rows), self.width, dtype=torch.int32), [], []
        for i, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            counts.append(len(tokens) or 1)
            if row is None:
                lengths.append(0)
                slots.append(-1)
                continue
            old, blocks = row
            lengths.append(len(old) + len(tokens))
            table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(len(old), lengths[-1])]
        cu = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return [cu, torch.tensor(lengths, dtype=torch.int32), table, torch.tensor(slots)]

    def run(self, rows: list[tuple[list[int], list[int]] | None], new: list[list[int]], clock: int) -> None:
        """The same step on both; equal outputs, and equal pages wherever a row has blocks."""
        arrays = self.batch(rows, new)
        inputs = []
        for layer in range(LAYERS):
            kv = [
                self.table(layer, tokens or [0], len(row[0]) if row else 0)
                for row, tokens in zip(rows, new, strict=True)
            ]
            k, v = (torch.cat([pair[i] for pair in kv]) for i in (0, 1))
            inputs.append((torch.randn(len(k), Q_HEADS, DIM).bfloat16(), k, v))
        self.stores[0].begin(*arrays, clock=clock)
        wanted = [attend("cpu", self.stores[0], layer, *inputs[layer]) for layer in range(LAYERS)]
        self.clock.fill_(clock)
        got = self.decode(arrays, inputs) if len(rows) == ROWS else self.prefill(arrays, inputs)
        live = [i for i, row in enumerate(rows) for _ in (new[i] or [0]) if row is not None]
        held = [i for i, row in enumerate(rows) for _ in (new[i] or [0])]
        kept = torch.tensor([row in set(live) for row in held])
        for layer in range(LAYERS):
            assert relative_error(got[layer][kept], wanted[layer][kept]) < ALLOWED

    def prefill(self, arrays: list[torch.Tensor], inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        self.stores[1].begin(*(place(x) for x in arrays), clock=shared(self.clock))
        return [attend_on_gpu(self.stores[1], layer, *inputs[layer]) for layer in range(LAYERS)]

    def decode(self, arrays: list[torch.Tensor], inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        for target, x in zip(self.arrays, arrays, strict=True):
            target.copy_(x)
        for layer, x in enumerate(inputs):
            self.buffers.fill(layer, *x)
        if self.graph is None:
            self.graph = capture(self.decode_step)
        self.graph.replay()
        return self.buffers.results(ROWS)

    def decode_step(self) -> None:
        self.stores[1].begin(*(shared(x) for x in self.arrays), clock=shared(self.clock), max_row_tokens=1)
        self.buffers.attend(self.stores[1])

    def check_pages(self, blocks: list[int]) -> None:
        """Sealed blocks have the same payload bytes on both."""
        on_gpu = self.pages[1].cpu()
        for block in blocks:
            payload = [pages[:, block, :, 64:] for pages in (self.pages[0], on_gpu)]
            assert torch.equal(*payload)


@pytest.mark.parametrize("bits", [8, 0])
def test_attached_steps_replay(bits: int) -> None:
    """begin inside the graph; an engine frees and replaces sequences between replays, some rows are padding."""
    torch.manual_seed(bits)
    rng = random.Random(bits)
    pair = Attached(bits)
    free = list(range(1, pair.n_blocks))
    rows: list[tuple[list[int], list[int]] | None] = [None] * ROWS

    def reserve(blocks: list[int], n_tokens: int) -> None:
        while len(blocks) * BLOCK < n_tokens:
            blocks.append(free.pop(rng.randrange(len(free))))

    for clock in range(1, STEPS):
        for i, row in enumerate(rows):
            if row is not None and (rng.random() < 0.02 or len(row[0]) >= 600):
                free += row[1]
                rows[i] = None
            elif row is None and rng.random() < 0.2:
                tokens, blocks = [rng.randrange(99) for _ in range(rng.choice([1, 63, 64, 130, 300]))], []
                reserve(blocks, len(tokens))
                pair.run([([], blocks)], [tokens], clock)
                rows[i] = (tokens, blocks)
        new: list[list[int]] = []
        for row in rows:
            new.append([rng.randrange(99)] if row else [])
            if row:
                reserve(row[1], len(row[0]) + 1)
        pair.run(rows, new, clock)
        for row, tokens in zip(rows, new, strict=True):
            if row:
                row[0].extend(tokens)
        if clock % 50 == 0 and bits:
            pair.check_pages([block for row in rows if row for block in row[1][: len(row[0]) // BLOCK]])
    assert pair.graph is not None


ORPHAN = """
import torch
import hybridkv

cache = hybridkv.Cache(num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16", device="cuda:0", max_tokens=256)
q, k, v = (torch.zeros(1, n_heads, 64, dtype=torch.bfloat16, device="cuda") for n_heads in (8, 2, 2))
out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
with cache.step([cache.add_sequence()], [1]) as step:
    with torch.cuda.graph(graph):
        step.attend(0, q, k, v, out=out)
    step.replay(graph)
torch.cuda.synchronize()
cache.close()
print("replaying")
graph.replay()
torch.cuda.synchronize()
print("not noticed")
"""


@needs_gpu
@pytest.mark.skipif(
    os.environ.get("HYBRIDKV_CUDA_DEBUG") != "1",
    reason="needs a backend built and tests run with HYBRIDKV_CUDA_DEBUG=1",
)
def test_a_graph_that_outlives_its_cache_traps() -> None:
    run = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=False)
    assert run.stdout == "replaying\n", run.stderr
    assert run.returncode != 0
