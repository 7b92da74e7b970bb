"""Attention on the CPU against what a user could call instead, in one run: decode, prefill, sealing.

    python benchmarks/cpu_attention.py                     every table
    python benchmarks/cpu_attention.py --only decode       one of decode, prefill, seal
    python benchmarks/cpu_attention.py --out results.json

Peers, all on the same values in bf16: torch's scaled_dot_product_attention called with enable_gqa and with the
group's heads as query rows of one KV head, and two matmuls with a softmax between. Ratios are against the fastest of
them. With llama-cpp-python installed, llama.cpp's flash attention at f16, q8_0 and q4_0 is timed beside them. Calls
take turns; caches rotate so that no call finds its keys in the processor's cache. hybridkv's time includes appending
the new tokens (and sealing, when a block fills).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import llama_peer
from machine import machine_line, read_bandwidth, save, time_alternating

import hybridkv

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP = Q_HEADS // KV_HEADS


def plain_config(bits: int, progressive: bool = False) -> hybridkv.HybridConfig:
    """Hot 32, one sink block; progressive reading off unless asked for, so that every byte is read."""
    if progressive:
        return hybridkv.HybridConfig(quantization_bits=bits)
    return hybridkv.HybridConfig(quantization_bits=bits, skip_mass=0.0, refine_mass=0.0)


def filled_cache(
    bits: int, rows: int, length: int, layers: int, spare: int, step_tokens: int = 0
) -> tuple[hybridkv.Cache, list[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """A cache of `rows` sequences of `length` random tokens, with room for `spare` more each; and K, V per layer."""
    cache = hybridkv.Cache(
        plain_config(bits),
        num_layers=layers,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
        max_tokens=rows * (length + spare + 128),
        max_sequences=rows,
        max_step_tokens=max(rows * min(length, 8192), step_tokens, rows),
        prefix_reuse=False,
    )
    sequences = [cache.add_sequence() for _ in range(rows)]
    contents = []
    for _ in range(layers):
        k = torch.randn(rows, length, KV_HEADS, DIM).to(torch.bfloat16)
        v = torch.randn(rows, length, KV_HEADS, DIM).to(torch.bfloat16)
        contents.append((k, v))
    chunk = min(length, 8192) or 1
    for start in range(0, length, chunk):
        stop = min(length, start + chunk)
        q = torch.zeros(rows * (stop - start), KV_HEADS, DIM, dtype=torch.bfloat16)
        with cache.step(sequences, [stop - start] * rows) as step:
            for layer, (k, v) in enumerate(contents):
                step.attend(layer, q, k[:, start:stop].flatten(0, 1), v[:, start:stop].flatten(0, 1))
    return cache, sequences, contents


def decode_peers(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways of decoding one token with torch. k, v: [B, Hkv, S, D]; q: [B, Hq, 1, D]."""
    grouped = q.view(q.shape[0], KV_HEADS, GROUP, DIM)
    scale = 1.0 / math.sqrt(DIM)

    def two_matmuls() -> torch.Tensor:
        weights = torch.softmax((grouped @ k.transpose(2, 3)).float() * scale, dim=-1).to(q.dtype)
        return weights @ v

    return {
        "torch SDPA enable_gqa": lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "torch SDPA grouped rows": lambda: functional.scaled_dot_product_attention(grouped, k, v),
        "torch two matmuls": two_matmuls,
    }


def rotating(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """One call that takes the next of several each time."""
    state = {"next": 0}

    def call() -> object:
        state["next"] = (state["next"] + 1) % len(calls)
        return calls[state["next"]]()

    return call


def decode_rows(rows: int, length: int, rounds: int) -> list[dict[str, Any]]:
    """One token for each of `rows` sequences of `length`; a "layer" is one of several caches that take turns."""
    layers = max(2, math.ceil(300e6 / (rows * length * KV_HEADS * DIM * 4)))
    q = torch.randn(rows, Q_HEADS, DIM).to(torch.bfloat16)
    new_k = torch.randn(rows, KV_HEADS, DIM).to(torch.bfloat16)
    new_v = torch.randn(rows, KV_HEADS, DIM).to(torch.bfloat16)
    contents = [
        tuple(torch.randn(rows, KV_HEADS, length, DIM).to(torch.bfloat16) for _ in range(2)) for _ in range(layers)
    ]
    peer_sets = [decode_peers(k, v, q[:, :, None]) for k, v in contents]
    calls: dict[str, Callable[[], object]] = {
        name: rotating([peers[name] for peers in peer_sets]) for name in peer_sets[0]
    }
    peers = list(calls)
    llama = llama_calls(contents[:2], q)
    calls |= llama
    out = torch.empty_like(q)
    for bits in (8, 6, 4, 0):
        cache, sequences, _ = filled_cache(bits, rows, length, layers, spare=32 * (rounds + 2))
        calls[f"hybridkv bits {bits}"] = HybridDecode(cache, sequences, layers, q, new_k, new_v, out)
    times = time_alternating(calls, rounds)
    best = min(times[name]["median"] for name in peers)
    table = []
    for name, ms in times.items():
        table.append({"work": f"decode {rows}x{length}", "name": name, **ms, "ratio": best / ms["median"]})
    return table


def llama_calls(contents: list[tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor) -> dict[str, Callable[[], object]]:
    """llama.cpp's attention on the same values, for each cache type; empty if it is not installed."""
    if not llama_peer.available():
        return {}
    query = q.float().numpy()
    calls: dict[str, Callable[[], object]] = {}
    for cache_type in ("f16", "q8_0", "q4_0"):
        graphs = [
            llama_peer.LlamaAttention(
                cache_type, k.float().numpy(), v.float().numpy(), Q_HEADS, torch.get_num_threads()
            )
            for k, v in contents
        ]
        calls[f"llama.cpp {cache_type}"] = rotating([lambda graph=graph: graph(query) for graph in graphs])  # type: ignore[misc]
    return calls


class HybridDecode:
    """One layer of a decode step per call; a new step whenever all layers had their turn."""

    def __init__(
        self, cache: hybridkv.Cache, sequences: list[Any], layers: int, q: Any, k: Any, v: Any, out: Any
    ) -> None:
        self.cache, self.sequences, self.layers = cache, sequences, layers
        self.q, self.k, self.v, self.out = q, k, v, out
        self.layer = 0
        self.step: Any = None

    def __call__(self) -> object:
        if self.layer == 0:
            self.step = self.cache.step(self.sequences, [1] * len(self.sequences))
            self.step.__enter__()
        self.step.attend(self.layer, self.q, self.k, self.v, out=self.out)
        self.layer = (self.layer + 1) % self.layers
        if self.layer == 0:
            self.step.__exit__(None, None, None)
        return self.out


def prefill_rows(new: int, cached: int, rounds: int) -> list[dict[str, Any]]:
    """`new` tokens over `cached` older ones, against torch on the same K and V in bf16."""
    k = torch.randn(1, KV_HEADS, cached + new, DIM).to(torch.bfloat16)
    v = torch.randn(1, KV_HEADS, cached + new, DIM).to(torch.bfloat16)
    q = torch.randn(1, Q_HEADS, new, DIM).to(torch.bfloat16)
    visible = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
    bias = torch.zeros(new, cached + new, dtype=torch.bfloat16).masked_fill(~visible, -math.inf)
    wide_k, wide_v = (x.repeat_interleave(GROUP, dim=1) for x in (k, v))
    calls: dict[str, Callable[[], object]] = {
        "torch SDPA mask": lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True),
        "torch SDPA mask, heads repeated": lambda: functional.scaled_dot_product_attention(
            q, wide_k, wide_v, attn_mask=bias
        ),
    }
    if not cached:
        calls["torch SDPA is_causal"] = lambda: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        calls["torch SDPA is_causal, heads repeated"] = lambda: functional.scaled_dot_product_attention(
            q, wide_k, wide_v, is_causal=True
        )
    peers = list(calls)
    flat_q, flat_k, flat_v = (x[0].transpose(0, 1).contiguous() for x in (q, k[:, :, cached:], v[:, :, cached:]))
    for bits in (8, 4):
        cache, sequences, _ = filled_cache(bits, 1, cached, 1, spare=new, step_tokens=new)
        sequence = sequences[0]

        def call(cache: hybridkv.Cache = cache, sequence: Any = sequence) -> object:
            with cache.step([sequence], [new]) as step:
                out = step.attend(0, flat_q, flat_k, flat_v)
            cache.truncate(sequence, cached)
            return out

        calls[f"hybridkv bits {bits}"] = call
    times = time_alternating(calls, rounds, settle=0, burst=1)
    best = min(times[name]["median"] for name in peers)
    work = f"prefill {new} over {cached}"
    return [{"work": work, "name": name, **ms, "ratio": best / ms["median"]} for name, ms in times.items()]


def seal_rows(rounds: int) -> list[dict[str, Any]]:
    """Cost of sealing a block of all heads, per token, beside a decode step at 8K."""
    decode = decode_rows(1, 8192, rounds)
    step_ms = next(row["median"] for row in decode if row["name"] == "hybridkv bits 8")
    k = torch.randn(KV_HEADS, 64, DIM).to(torch.bfloat16)
    v = torch.randn(KV_HEADS, 64, DIM).to(torch.bfloat16)
    config = plain_config(8)

    def seal() -> None:
        for head in range(KV_HEADS):
            hybridkv.record_encode(config, k[head], v[head])

    ms = time_alternating({"seal": seal}, rounds * 10)["seal"]
    per_token = ms["median"] / 64
    return [
        {"work": "seal 64 tokens x 8 heads", "name": "hybridkv bits 8, 1 thread", **ms, "ratio": per_token / step_ms}
    ]


def show(rows: list[dict[str, Any]], bandwidth: float) -> None:
    """One table for people. The ratio of a seal row is its share of a decode step."""
    table = Table(title=f"CPU attention, {Q_HEADS}/{KV_HEADS} heads, D {DIM}; torch reads {bandwidth:.1f} GB/s")
    for column in ("work", "what", "ms (median)", "min", "ratio to the best peer"):
        table.add_column(column, justify="left" if column in ("work", "what") else "right")
    for row in rows:
        is_seal = row["work"].startswith("seal")
        ratio = f"{row['ratio']:.2%} of a decode step" if is_seal else f"{row['ratio']:.2f}x"
        table.add_row(row["work"], row["name"], f"{row['median']:.3f}", f"{row['min']:.3f}", ratio)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["decode", "prefill", "seal"])
    parser.add_argument("--threads", type=int, default=hybridkv.get_num_threads())
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    hybridkv.set_num_threads(args.threads)
    bandwidth = read_bandwidth(args.threads)
    rows: list[dict[str, Any]] = []
    if args.only in (None, "decode"):
        rows += decode_rows(1, 32768, args.rounds) + decode_rows(4, 2048, args.rounds)
    if args.only in (None, "prefill"):
        rows += prefill_rows(2048, 0, 3) + prefill_rows(2048, 8192, 3)
    if args.only in (None, "seal"):
        rows += seal_rows(args.rounds)
    show(rows, bandwidth)
    machine = machine_line(args.threads)
    machine["read_gb_per_s"] = round(bandwidth, 1)
    save(args.out, machine, rows)


if __name__ == "__main__":
    main()
