"""The answers that tests compare with: attention in double precision, and a plain model of a cache.

Nothing here uses hybridkv. Shapes: N new tokens, S keys, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

LENGTHS = [0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 161]
"""Lengths around blocks, the hot window and both together; swept wherever a length is a parameter."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last N of S positions, every operation in `dtype`.

    Parameters
    ----------
    q : [N, Hq, D]
    k, v : [S, Hkv, D]
        Query i sits at position S - N + i.
    sinks : [Hq], optional
        A logit per head that joins the denominator only.

    Returns
    -------
    out : [N, Hq, D] in `dtype`
    lse : [N, Hq] natural log of the denominator
    """
    n, hq, d = q.shape
    s, hkv, _ = k.shape
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    k = k.to(dtype).repeat_interleave(hq // hkv, dim=1)
    v = v.to(dtype).repeat_interleave(hq // hkv, dim=1)
    scores = torch.einsum("nhd,shd->nhs", q.to(dtype), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(s - n, s)[:, None]
    key = torch.arange(s)[None]
    hidden = key > position
    if window:
        hidden |= key <= position - window
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    if sinks is not None:
        column = sinks.to(dtype)[None, :, None].expand(n, hq, 1)
        lse = torch.logsumexp(torch.cat([scores, column], dim=-1), dim=-1)
    else:
        lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("nhs,shd->nhd", weights, v), lse


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the answer; NaN never passes a comparison."""
    difference = (out.double() - want.double()).norm()
    return float(difference / want.double().norm().clamp_min(1e-30))


def allowed_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, want: torch.Tensor, **options: object) -> float:
    """Twice the error of plain PyTorch at the precision of `q`, with a floor for its luck on tiny inputs."""
    plain, _ = attention(q, k.to(q.dtype), v.to(q.dtype), dtype=q.dtype, **options)  # type: ignore[arg-type]
    floor = {torch.float16: 2e-4, torch.bfloat16: 1.5e-3, torch.float32: 5e-5}[q.dtype]
    return max(2.0 * relative_error(plain, want), floor)


@dataclass
class Stored:
    """What a cache holds of S tokens, at every precision that progressive reading chooses from; K and V [S, Hkv, D]."""

    exact: tuple[torch.Tensor, torch.Tensor]
    best: tuple[torch.Tensor, torch.Tensor]
    int4: tuple[torch.Tensor, torch.Tensor]
    hot_blocks: list[int]
    block: int = 64


def progressive_attention(
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    stored: Stored,
    skip: float,
    refine: float,
    tile_columns: int | None = None,
) -> tuple[torch.Tensor, dict[str, int]]:
    """Decode attention of N new tokens behind S stored ones, by the rule of docs/transitions.md.

    Parameters
    ----------
    q : [N, Hq, D]
    new : K and V of the new tokens, [N, Hkv, D]
    tile_columns : int, optional
        Query columns (column = token * G + head of the group) that are judged together; None = all.

    Returns
    -------
    out : [N, Hq, D] float64
    counts : records that were read, skipped and refined, over KV heads and tiles
    """
    n, hq, dim = q.shape
    n_stored, hkv, _ = stored.exact[0].shape
    group = hq // hkv
    tile = tile_columns or n * group
    records = [b for b in range(math.ceil(n_stored / stored.block)) if b not in stored.hot_blocks]
    out = torch.zeros(n, hq, dim, dtype=torch.float64)
    counts = {"read": 0, "skipped": 0, "refined": 0}

    def part(kv: tuple[torch.Tensor, torch.Tensor], block: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(block * stored.block, min(n_stored, (block + 1) * stored.block))
        return kv[0][rows, head].double(), kv[1][rows, head].double()

    for head in range(hkv):
        columns = q[:, head * group : (head + 1) * group].reshape(n * group, dim).double() / math.sqrt(dim)
        hot = [part(stored.exact, block, head) for block in stored.hot_blocks]
        for first in range(0, n * group, tile):
            tile_idx = range(first, min(first + tile, n * group))
            seen = {
                c: [*hot, (new[0][: c // group + 1, head].double(), new[1][: c // group + 1, head].double())]
                for c in tile_idx
            }
            reference = {c: torch.logsumexp(torch.cat([k for k, _ in seen[c]]) @ columns[c], 0) for c in tile_idx}
            for block in records:
                counts["read"] += 1
                scores = {c: part(stored.int4, block, head)[0] @ columns[c] for c in tile_idx}
                share = max(float(torch.exp(torch.logsumexp(scores[c], 0) - reference[c])) for c in tile_idx)
                if share < skip:
                    counts["skipped"] += 1
                    continue
                counts["refined"] += share >= refine
                chosen = part(stored.best if share >= refine else stored.int4, block, head)
                for c in tile_idx:
                    seen[c].append(chosen)
            for c in tile_idx:
                weights = torch.softmax(torch.cat([k for k, _ in seen[c]]) @ columns[c], 0)
                out[c // group, head * group + c % group] = weights @ torch.cat([v for _, v in seen[c]])
    return out, counts


class KvTable:
    """Keys and values as a fixed function of (layer, position, token id), so that equal prefixes have equal K and V."""

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size = 4093
        shape = (2, n_layers, self.size, n_kv_heads, head_dim)
        self.table = torch.randn(shape, generator=generator).to(dtype)

    def __call__(self, layer: int, tokens: list[int], first_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, Hkv, D] of consecutive tokens."""
        index = [(7919 * t + 104729 * (first_position + i)) % self.size for i, t in enumerate(tokens)]
        return self.table[0, layer, index], self.table[1, layer, index]


@dataclass
class PlainCache:
    """What a cache should contain: per sequence its token ids, nothing else."""

    sequences: dict[int, list[int]] = field(default_factory=dict)

    def fork(self, source: int, target: int) -> None:
        self.sequences[target] = list(self.sequences[source])

    def reorder(self, names: list[int], source_idx: list[int]) -> None:
        old = {name: list(self.sequences[name]) for name in names}
        for name, idx in zip(names, source_idx, strict=True):
            self.sequences[name] = list(old[names[idx]])
