"""Queries, keys and values of one decode step or prefill chunk, and the exact answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

Q_HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
GROUP = Q_HEADS // KV_HEADS
HOT_TOKENS = 32
TOKEN_BYTES_16 = 2 * KV_HEADS * DIM * 2
"""K and V of one token in 16 bit."""


@dataclass
class Inputs:
    """One token for each of several sequences.

    q : [R, Hq, D] bfloat16; rows : per sequence K and V, [length, Hkv, D] bfloat16, the new token last.
    """

    q: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def lengths(self) -> list[int]:
        return [k.shape[0] for k, _ in self.rows]

    @property
    def bytes_16(self) -> int:
        """Bytes of K and V in 16 bit."""
        return sum(self.lengths) * TOKEN_BYTES_16

    @cached_property
    def expected(self) -> torch.Tensor:
        """[R, Hq, D] float64."""
        return torch.stack([exact(q[None], k, v)[0] for q, (k, v) in zip(self.q, self.rows, strict=True)])


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last N of S positions in float64; q [N, Hq, D], k and v [S, Hkv, D]; [N, Hq, D]."""
    n, hq, dim = q.shape
    n_keys, hkv, _ = k.shape
    out = torch.empty(n, hq, dim, dtype=torch.float64, device=q.device)
    hidden = torch.ones(n, n_keys, dtype=torch.bool, device=q.device).triu(n_keys - n + 1)
    for head in range(hkv):
        columns = slice(head * hq // hkv, (head + 1) * hq // hkv)
        scores = q[:, columns].double() @ k[:, head].double().T / math.sqrt(dim)
        weights = scores.masked_fill_(hidden[:, None], -math.inf).softmax(dim=-1)
        out[:, columns] = weights @ v[:, head].double()
    return out


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the answer."""
    return float((out.double() - want).norm() / want.norm())


def n_older_blocks(length: int) -> int:
    """Blocks before the hot zone of a sequence; all but the first, which stays hot, are read from records."""
    return (length - HOT_TOKENS) // PAGE


def normal_inputs(lengths: list[int]) -> Inputs:
    """N(0, 1) throughout."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    rows = [(draw(length, KV_HEADS, DIM), draw(length, KV_HEADS, DIM)) for length in lengths]
    return Inputs(draw(len(lengths), Q_HEADS, DIM), rows)


def concentrated_inputs(lengths: list[int], low: float, high: float) -> Inputs:
    """Sequences where a share `high` of the blocks matters to the query, a share `low` does not, the rest in between.

    The softmax of a block, relative to the first block and the newest tokens together, is about 0.2, 1e-4 and 7e-3:
    far on their sides of the default thresholds 0.05 and 1e-3. All queries of a KV head share a component of one
    direction, along which the keys of a block are shifted together. Which blocks, differs between heads and rows.
    """
    inputs = normal_inputs(lengths)
    direction = torch.nn.functional.normalize(torch.randn(KV_HEADS, DIM, device="cuda"), dim=-1)
    strength = 8.0
    q = inputs.q.float().view(-1, KV_HEADS, GROUP, DIM)
    along = (q * direction[:, None]).sum(-1, keepdim=True)
    inputs.q = (q + (strength - along) * direction[:, None]).flatten(1, 2).to(torch.bfloat16)
    for k, _ in inputs.rows:
        n_blocks = n_older_blocks(k.shape[0]) - 1
        n_hot = k.shape[0] - n_blocks * PAGE
        order = torch.rand(n_blocks, KV_HEADS, device="cuda").argsort(dim=0)
        share = torch.full_like(order, 7e-3, dtype=torch.float32)
        share[order < round(low * n_blocks)] = 1e-4
        share[order >= n_blocks - round(high * n_blocks)] = 0.2
        shift = (share.log() - math.log(PAGE / n_hot)) * math.sqrt(DIM) / strength
        blocks = k[PAGE : PAGE * (n_blocks + 1)].view(n_blocks, PAGE, KV_HEADS, DIM)
        plain = blocks.float()
        plain -= (plain * direction).sum(-1, keepdim=True) * direction
        blocks.copy_(plain + shift[:, None, :, None] * direction)
    return inputs
