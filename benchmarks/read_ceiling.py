"""A kernel that only reads: the ceiling for whatever has to fetch as many bytes. Needs Triton, which torch brings."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PROGRAMS_PER_SM = 2
SHAPES = ((4096, 16, 4), (8192, 32, 2), (8192, 16, 4))
"""(words a program loads at once, warps, loads in flight); which is fastest depends on the size."""


@triton.jit
def _read(data, sink, n_words, step: tl.constexpr, in_flight: tl.constexpr):  # type: ignore[no-untyped-def]
    """XOR of all words, strided over the programs; the sums are stored so that no load is left out."""
    lanes = tl.arange(0, step)
    seen = tl.zeros([step], tl.int32)
    first = tl.program_id(0) * step
    stride = tl.num_programs(0) * step
    for start in tl.range(first, n_words, stride, loop_unroll_factor=in_flight):
        offsets = start + lanes
        seen ^= tl.load(data + offsets, mask=offsets < n_words, other=0, eviction_policy="evict_first")
    tl.store(sink + tl.program_id(0), tl.xor_sum(seen, 0))


class Reader:
    """Reads pieces of one large buffer, each launch another one, so that nothing is found in the L2 cache."""

    def __init__(self, n_bytes: int) -> None:
        self.buffer = torch.randint(-(2**31), 2**31 - 1, (n_bytes // 4,), dtype=torch.int32, device="cuda")
        self.n_programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(0).multi_processor_count
        self.sink = torch.empty(self.n_programs, dtype=torch.int32, device="cuda")

    def calls(self, n_bytes: int, n_calls: int, shape: tuple[int, int, int]) -> list[Any]:
        """`n_calls` launches that read `n_bytes` each."""
        n_words = n_bytes // 64 * 16
        pieces = max(1, self.buffer.numel() // n_words)
        step, warps, in_flight = shape

        def call(piece: int) -> None:
            data = self.buffer[piece * n_words : (piece + 1) * n_words]
            _read[(self.n_programs,)](data, self.sink, n_words, step, in_flight, num_warps=warps)

        return [lambda piece=i % pieces: call(piece) for i in range(n_calls)]
