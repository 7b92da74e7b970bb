"""A serving engine that treats a `hybridkv.Store` the way real ones do, and checks everything the store answers.

It owns the pages and the block tables, never tells the store which request is which, and does all that is legal behind
the store's back: frees blocks and hands them to others, shares full blocks between sequences, rewrites slots after
rejected drafts, preempts and recomputes, copies pages, zeroes or poisons freed ones, runs dummy steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from devices import attend, to_device, to_host
from reference import KvTable, allowed_error, attention, relative_error

import hybridkv

POISON = 0xFF
# Largest difference between what was appended (N(0,1) values) and what a block gives back. Every restore from a record
# and sealing anew adds one rounding (at most 0.25 at 4 bits); a wrong token would differ by 2 and more.
STORED_ERROR = {0: 0.0, 8: 0.08, 6: 1.0, 4: 1.0}


@dataclass
class Sequence:
    """Tokens that are certain, and the physical blocks that hold them (and perhaps rejected drafts behind them)."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Engine:
    """Pages [L, B, Hkv, record_bytes] of uint8 on `device`, a block allocator and some sequences."""

    def __init__(
        self,
        *,
        bits: int = 8,
        n_blocks: int = 40,
        max_rows: int = 8,
        layers: int = 2,
        q_heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        seed: int = 0,
        n_hot_pages: int = 0,
        **config: Any,
    ) -> None:
        self.bits, self.block, self.layers, self.device = bits, 64, layers, device
        self.q_heads, self.kv_heads, self.dim, self.dtype = q_heads, kv_heads, dim, dtype
        self.config = hybridkv.HybridConfig(quantization_bits=bits, **{"skip_mass": 0.0, "refine_mass": 0.0, **config})
        self.store = hybridkv.Store(
            self.config,
            num_layers=layers,
            num_kv_heads=kv_heads,
            head_dim=dim,
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            num_blocks=n_blocks,
            max_rows=max_rows,
            max_new_tokens=4096,
            num_hot_pages=n_hot_pages,
        )
        record_bytes = self.store.record_bytes
        self.pages = torch.full((layers, n_blocks, kv_heads, record_bytes), POISON, dtype=torch.uint8, device=device)
        for layer in range(layers):
            self.store.bind_layer(layer, self.pages[layer])
        self.has_small_pool = n_hot_pages > 0
        self.random = random.Random(seed)
        self.free = list(range(1, n_blocks))
        self.random.shuffle(self.free)
        self.references = [0] * n_blocks
        self.table = KvTable(layers, kv_heads, dim, dtype, seed)
        self.sequences: dict[int, Sequence] = {}
        self.next_name = 0
        self.clock = 0

    # ------------------------------------------------------------------------------------------------ block allocator

    def can_allocate(self, n: int) -> bool:
        return len(self.free) >= n

    def allocate(self) -> int:
        block = self.free.pop()
        self.references[block] = 1
        return block

    def release(self, block: int) -> None:
        """Give a block back; the engine may wipe it."""
        self.references[block] -= 1
        if self.references[block] == 0:
            wipe = self.random.choice([None, 0, POISON])
            if wipe is not None:
                self.pages[:, block] = wipe
            self.free.insert(self.random.randrange(len(self.free) + 1), block)

    # ---------------------------------------------------------------------------------------------- life of sequences

    def add(self) -> int:
        self.next_name += 1
        self.sequences[self.next_name] = Sequence()
        return self.next_name

    def share(self, name: int) -> int:
        """A new sequence that takes over the full blocks of another by reference, as a prefix hit does."""
        source, target = self.sequences[name], self.add()
        n_full = len(source.tokens) // self.block
        self.sequences[target] = Sequence(source.tokens[: n_full * self.block], source.blocks[:n_full])
        for block in source.blocks[:n_full]:
            self.references[block] += 1
        return target

    def copy(self, name: int) -> int | None:
        """A new sequence whose full blocks are byte copies, made without telling the store."""
        source = self.sequences[name]
        n_full = min(len(source.tokens) // self.block, len(source.blocks))
        if not self.can_allocate(n_full):
            return None
        blocks = [self.allocate() for _ in range(n_full)]
        for old, new in zip(source.blocks, blocks, strict=False):
            self.pages[:, new] = self.pages[:, old]
        target = self.add()
        self.sequences[target] = Sequence(source.tokens[: n_full * self.block], blocks)
        return target

    def preempt(self, name: int) -> None:
        """Take all blocks away; the tokens will be computed again."""
        sequence = self.sequences[name]
        for block in sequence.blocks:
            self.release(block)
        sequence.blocks = []

    def drop(self, name: int) -> None:
        self.preempt(name)
        del self.sequences[name]

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(self, work: dict[int, tuple[list[int], int]], padding: int = 0) -> bool:
        """One step. work: per sequence the new tokens and how many of them are kept (the rest are rejected drafts).

        A preempted sequence first computes its old tokens again, in the same step. Returns False if the blocks
        do not suffice, with nothing done, or the hot pages, with the sequences preempted.
        """
        rows: list[tuple[Sequence, list[int], int]] = []
        needed = 0
        for name, (new, kept) in work.items():
            sequence = self.sequences[name]
            missing = [] if sequence.blocks or not sequence.tokens else sequence.tokens
            context = 0 if missing else len(sequence.tokens)
            tokens = missing + new
            needed += max(0, -(-(context + len(tokens)) // self.block) - len(sequence.blocks))
            rows.append((sequence, tokens, context))
            assert 0 <= kept <= len(new)
        if not self.can_allocate(needed):
            return False
        for sequence, tokens, context in rows:
            while len(sequence.blocks) * self.block < context + len(tokens):
                sequence.blocks.append(self.allocate())
        try:
            self.run(rows, padding)
        except hybridkv.CacheFullError:  # a hot pool smaller than guaranteed
            assert self.has_small_pool
            for name in work:
                self.preempt(name)
            return False
        for name, (new, kept) in work.items():
            self.sequences[name].tokens += new[:kept]
        return True

    def run(self, rows: list[tuple[Sequence, list[int], int]], padding: int) -> None:
        """Hand the batch over, attend every layer, check every row."""
        counts = [len(tokens) for _, tokens, _ in rows] + [0] * padding
        lengths = [context + len(tokens) for _, tokens, context in rows] + [0] * padding
        width = max([1, *(-(-length // self.block) for length in lengths)])
        table = torch.zeros(len(counts), width, dtype=torch.int32)
        slots: list[int] = []
        for i, (sequence, tokens, context) in enumerate(rows):
            used = -(-lengths[i] // self.block)
            table[i, :used] = torch.tensor(sequence.blocks[:used], dtype=torch.int32)
            slots += [
                sequence.blocks[p // self.block] * self.block + p % self.block
                for p in range(context, context + len(tokens))
            ]
        cu = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        self.clock += 1
        self.begin(cu, torch.tensor(lengths, dtype=torch.int32), table, torch.tensor(slots, dtype=torch.int64))
        for layer in range(self.layers):
            q = torch.randn(len(slots), self.q_heads, self.dim).to(self.dtype)
            kv = [self.table(layer, tokens, context) for _, tokens, context in rows]
            k, v = (torch.cat([*(pair[i] for pair in kv), q.new_empty(0, self.kv_heads, self.dim)]) for i in (0, 1))
            out = torch.full_like(q, float("nan"))
            attend(self.device, self.store, layer, q, k, v, out=out)
            for i, (sequence, tokens, context) in enumerate(rows):
                part = slice(int(cu[i]), int(cu[i + 1]))
                self.check(layer, sequence, tokens, context, q[part], out[part])

    def begin(self, cu: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> None:
        most = int(cu.diff().max()) if len(cu) > 1 else 0
        arrays = [to_device(x, self.device) for x in (cu, lengths, table, slots)]
        clock: Any = self.clock if self.device == "cpu" else torch.tensor([self.clock], device=self.device)
        self.store.begin(*arrays, clock=clock, max_row_tokens=most)
        if self.has_small_pool and self.device != "cpu":
            torch.cuda.synchronize()
            self.store.begin(*arrays, clock=clock, max_row_tokens=most)  # says if the device refused the first

    def dummy_step(self, n_rows: int) -> None:
        """What idle ranks and warm-ups run: no slots, stale tables. Nothing may change."""
        before = self.snapshot()
        table = torch.randint(0, len(self.references), (n_rows, 3), dtype=torch.int32)
        cu = torch.arange(n_rows + 1, dtype=torch.int32)
        self.begin(
            cu, torch.full((n_rows,), 130, dtype=torch.int32), table, torch.full((n_rows,), -1, dtype=torch.int64)
        )
        for layer in range(self.layers):
            x = torch.randn(n_rows, self.q_heads, self.dim).to(self.dtype)
            kv = torch.randn(n_rows, self.kv_heads, self.dim).to(self.dtype)
            attend(self.device, self.store, layer, x, kv, kv)
        after = self.snapshot()
        assert torch.equal(before[0], after[0])
        assert before[1] == after[1]

    def snapshot(self) -> tuple[torch.Tensor, dict[int, tuple[int, int, bool]]]:
        """All bytes of all pages, and the hot page of every block that has a valid one."""
        hot = {}
        for block in range(len(self.references)):
            info = self.store.block_info(block)
            stamp = int(self.pages[0, block, 0, :4].cpu().view(torch.int32)) & 0xFFFFFFFF
            if self.bits and info["hot_page"] >= 0 and info["stamp"] == stamp:
                hot[block] = (info["hot_page"], info["n_hot_tokens"], info["sealed"])
        return self.pages.clone(), hot

    # --------------------------------------------------------------------------------------------------------- checks

    def check(
        self, layer: int, sequence: Sequence, tokens: list[int], context: int, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The row's older tokens are what was appended, within the precision; the output is attention over them."""
        if not tokens:
            return
        k_new, v_new = self.table(layer, tokens, context)
        k_old, v_old = self.read(layer, sequence, context + len(tokens), context)
        k_exact, v_exact = self.table(layer, sequence.tokens[:context], 0)
        for stored, exact in ((k_old, k_exact), (v_old, v_exact)):
            if context:
                assert (stored.float() - exact.float()).abs().amax() <= STORED_ERROR[self.bits]
        k, v = torch.cat([k_old, k_new]), torch.cat([v_old, v_new])
        want, _ = attention(q, k, v)
        assert relative_error(out, want) <= allowed_error(q, k, v, want)

    def read(self, layer: int, sequence: Sequence, length: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.tensor(sequence.blocks[: -(-length // self.block)], dtype=torch.int32)
        k, v = self.store.read_tokens(layer, blocks, length, 0, stop)
        return to_host(k), to_host(v)
