"""hybridkv on a GPU in attached mode: layers that are copies of one another, so that a step is a graph of attends."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpu import Call, stream_address
from gpu_inputs import DIM, HOT_TOKENS, KV_HEADS, PAGE, Q_HEADS, Inputs, n_older_blocks

import hybridkv

FILL_TOKENS = 8192


def config(bits: int, skip_mass: float = 0.0, refine_mass: float = 0.0, top_k: int = 32) -> hybridkv.HybridConfig:
    """Hot zone of 32 tokens, one sink block; progressive reading off unless asked for."""
    return hybridkv.HybridConfig(
        hot_tokens=HOT_TOKENS,
        quantization_bits=bits,
        skip_mass=skip_mass,
        refine_mass=refine_mass,
        sparse_top_k=top_k,
    )


class Layers:
    """A store whose layers all hold the same sequences, in blocks of random order.

    Full blocks are written once, by a store of one layer, and copied: a record is complete in itself. The first block
    and the tokens behind the last full one are appended to every layer, so that they are hot.

    Parameters
    ----------
    rows : per sequence K and V, [length, Hkv, D]
    n_held : how many tokens of each sequence are in the cache; steps may add the others.
    """

    def __init__(
        self,
        settings: hybridkv.HybridConfig,
        rows: list[tuple[torch.Tensor, torch.Tensor]],
        n_held: list[int],
        n_layers: int,
    ) -> None:
        self.settings, self.rows, self.n_layers = settings, rows, n_layers
        n_blocks = [-(-k.shape[0] // PAGE) for k, _ in rows]
        self.n_blocks = sum(n_blocks) + 1  # block 0 is the null block
        self.table = torch.zeros(len(rows), max(n_blocks), device="cuda", dtype=torch.int32)
        for row, blocks in enumerate(torch.randperm(self.n_blocks - 1, device="cuda").split(n_blocks)):
            self.table[row, : len(blocks)] = blocks + 1
        n_added = sum(k.shape[0] - n for (k, _), n in zip(rows, n_held, strict=True))
        self.store = self.make_store(n_layers, max(n_added, PAGE * len(rows)))
        shape = (n_layers, self.n_blocks, KV_HEADS, self.store.record_bytes)
        self.pages = torch.zeros(shape, device="cuda", dtype=torch.uint8)
        n_full = [n // PAGE * PAGE for n in n_held]
        self.fill_first_layer(n_full)
        self.pages[1:] = self.pages[0]
        for layer in range(n_layers):
            self.store.bind_layer(layer, self.pages[layer])
        self.append(self.store, n_layers, [0] * len(rows), [min(PAGE, n) for n in n_full])
        self.append(self.store, n_layers, n_full, n_held)

    def make_store(self, n_layers: int, max_new_tokens: int) -> hybridkv.Store:
        return hybridkv.Store(
            self.settings,
            num_layers=n_layers,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
            num_blocks=self.n_blocks,
            max_rows=len(self.rows),
            max_new_tokens=max_new_tokens,
            device="cuda",
        )

    def fill_first_layer(self, n_tokens: list[int]) -> None:
        """Write whole blocks, through a store that is given up afterwards."""
        store = self.make_store(1, max(1, sum(min(n, FILL_TOKENS) for n in n_tokens)))
        store.bind_layer(0, self.pages[0])
        for start in range(0, max(n_tokens), FILL_TOKENS):
            stop = start + FILL_TOKENS
            self.append(store, 1, [min(start, n) for n in n_tokens], [min(stop, n) for n in n_tokens])
        torch.cuda.synchronize()
        store.close()

    def append(self, store: hybridkv.Store, n_layers: int, starts: list[int], stops: list[int]) -> None:
        """A step that appends tokens start .. stop - 1 of every row to all layers."""
        if starts == stops:
            return
        step = StepOf(self, starts, stops)
        step.begin(store)
        out = torch.empty_like(step.k)
        for layer in range(n_layers):
            store.attend(layer, step.k, step.k, step.v, out=out, stream=stream_address())


class StepOf:
    """The batch of a step that has tokens start .. stop - 1 of every row as its new ones.

    With `writes` off no slot is given, so that the tokens are attended to but not appended.
    """

    def __init__(self, layers: Layers, starts: list[int], stops: list[int], writes: bool = True) -> None:
        self.layers = layers
        counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
        self.max_row_tokens = max(counts)
        self.starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        self.lengths = torch.tensor(stops, device="cuda", dtype=torch.int32)
        slots = []
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            position = torch.arange(start, stop, device="cuda")
            slots.append(layers.table[row, position // PAGE].long() * PAGE + position % PAGE)
        self.slots = torch.cat(slots) if writes else torch.full((sum(counts),), -1, device="cuda")
        pieces = [(k[a:b], v[a:b]) for (k, v), a, b in zip(layers.rows, starts, stops, strict=True)]
        self.k, self.v = (torch.cat([piece[which] for piece in pieces]) for which in (0, 1))

    def begin(self, store: hybridkv.Store | None = None) -> None:
        (store or self.layers.store).begin(
            self.starts,
            self.lengths,
            self.layers.table,
            self.slots,
            max_row_tokens=self.max_row_tokens,
            stream=stream_address(),
        )

    def attends(self, q: torch.Tensor, out: torch.Tensor) -> list[Call]:
        """One call for each layer, once after every `begin`."""

        def call(layer: int) -> None:
            self.layers.store.attend(layer, q, self.k, self.v, out=out, stream=stream_address())

        return [lambda layer=layer: call(layer) for layer in range(self.layers.n_layers)]  # type: ignore[misc]


def stored_error(layers: Layers, inputs: Inputs, out: torch.Tensor) -> float:
    """Error of the last row's first KV head against float64 on what the records of layer 0 hold."""
    k, v = (x[:, 0].double() for x in inputs.rows[-1])
    if layers.store.config.quantization_bits:
        blocks = layers.table[-1, 1 : n_older_blocks(k.shape[0])].long()
        records = layers.pages[0, blocks, 0].cpu().numpy()
        decoded = [hybridkv.record_decode(layers.store.config, record.tobytes(), DIM) for record in records]
        inner = slice(PAGE, PAGE * (len(decoded) + 1))
        k[inner], v[inner] = (torch.cat([torch.as_tensor(x[which]) for x in decoded]).cuda() for which in (0, 1))
    group = slice(0, Q_HEADS // KV_HEADS)
    weights = (inputs.q[-1, group].double() @ k.T / math.sqrt(DIM)).softmax(dim=-1)
    want = weights @ v
    return float((out[-1, group].double() - want).norm() / want.norm())


def to_l2(layers: Layers) -> None:
    """Put every record of the first row into L2, in all layers."""
    for block in layers.table[0, 1 : n_older_blocks(layers.rows[0][0].shape[0])].tolist():
        for head in range(KV_HEADS):
            layers.store.set_tier(0, head, block, "L2")
    tiers: Any = layers.pages[0, :, :, 7]  # docs/format.md; the layers' records are equal but for their history
    layers.pages[1:, :, :, 7] = tiers
