"""Decode and prefill attention of others, on the same values: each peer makes calls that a CUDA graph can capture.

A peer that is not installed, or cannot do a case, says why. All paged peers get pages of 64 tokens in random order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as functional
from gpu import Call
from gpu_inputs import DIM, KV_HEADS, PAGE, Q_HEADS, TOKEN_BYTES_16, Inputs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

FP8 = torch.float8_e4m3fn


class UnsupportedError(Exception):
    """A peer cannot do this case; the text says why."""


@dataclass
class Prepared:
    """Calls that take turns over copies of the cache, and where each writes [R, Hq, D]."""

    calls: list[Call]
    out: Callable[[], torch.Tensor]
    n_bytes: int


class PagedCopies:
    """Copies of the keys and values of `inputs` in 16 bit, made when a peer asks for them."""

    def __init__(self, inputs: Inputs, n_copies: int) -> None:
        self.inputs, self.n_copies = inputs, n_copies
        n_pages = [-(-length // PAGE) for length in inputs.lengths]
        order = torch.randperm(sum(n_pages), device="cuda", dtype=torch.int32)
        self.table = torch.zeros(len(n_pages), max(n_pages), device="cuda", dtype=torch.int32)
        for row, pages in enumerate(order.split(n_pages)):
            self.table[row, : len(pages)] = pages
        self.order = order.split(n_pages)
        self.lengths = torch.tensor(inputs.lengths, device="cuda", dtype=torch.int32)

    @cached_property
    def paged(self) -> list[torch.Tensor]:
        """[pages, 2, 64, Hkv, D] each; what lies behind a sequence's end is zero."""
        shape = (sum(len(pages) for pages in self.order), 2, PAGE, KV_HEADS, DIM)
        first = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        for pages, row in zip(self.order, self.inputs.rows, strict=True):
            for which, tokens in enumerate(row):
                padded = functional.pad(tokens, (0, 0, 0, 0, 0, len(pages) * PAGE - tokens.shape[0]))
                first[pages.long(), which] = padded.view(-1, PAGE, KV_HEADS, DIM)
        return [first, *(first.clone() for _ in range(self.n_copies - 1))]

    @cached_property
    def contiguous(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V as [R, Hkv, length, D]."""
        if len(set(self.inputs.lengths)) > 1:
            raise UnsupportedError("takes sequences of one length only")
        k, v = (torch.stack([row[which] for row in self.inputs.rows]).transpose(1, 2) for which in (0, 1))
        return [(k.clone(memory_format=torch.contiguous_format), v.contiguous()) for _ in range(self.n_copies)]


class Peer:
    """One way of attending. `bits` is what a stored element takes."""

    name: str
    bits: int
    prefills = False

    def missing(self) -> str:
        """Why it cannot be used here; "" if it can."""
        return ""

    def decode(self, copies: PagedCopies) -> Prepared:
        """One query token for every sequence."""
        raise NotImplementedError

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Call, Callable[[], torch.Tensor]]:
        """The last N of S positions, causally; q [N, Hq, D], k and v [S, Hkv, D]. A call, and its output [N, Hq, D]."""
        raise NotImplementedError


class TorchPeer(Peer):
    """scaled_dot_product_attention with one backend, on contiguous keys and values."""

    bits = 16
    prefills = True

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def attend(self, result: dict[str, torch.Tensor], q: Any, k: Any, v: Any, **options: Any) -> Call:
        def call() -> None:
            with sdpa_kernel(self.backend):
                result["out"] = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

        return call

    def decode(self, copies: PagedCopies) -> Prepared:
        result: dict[str, torch.Tensor] = {}
        q = copies.inputs.q[:, :, None]
        calls = [self.attend(result, q, k, v) for k, v in copies.contiguous]
        return Prepared(calls, lambda: result["out"][:, :, 0], copies.inputs.bytes_16)

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Call, Callable[[], torch.Tensor]]:
        result: dict[str, torch.Tensor] = {}
        n_new, n_keys = q.shape[0], k.shape[0]
        if n_new == n_keys:
            options: dict[str, Any] = {"is_causal": True}
        elif self.backend == SDPBackend.FLASH_ATTENTION:
            options = {"attn_mask": causal_lower_right(n_new, n_keys)}
        else:
            raise UnsupportedError("has no causal mask for new tokens over older ones")
        wide = [x.transpose(0, 1).contiguous()[None] for x in (q, k, v)]
        return self.attend(result, *wide, **options), lambda: result["out"][0].transpose(0, 1)


class FlashAttention3(Peer):
    """FlashAttention-3 as vLLM ships it; at fp8 the query is fp8 too."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.prefills = bits == 16
        self.name = "FlashAttention-3 " + ("bf16" if bits == 16 else "fp8")

    def missing(self) -> str:
        if importlib.util.find_spec("vllm") is None:
            return "vllm is not installed"
        from vllm.vllm_flash_attn import flash_attn_interface

        return "" if flash_attn_interface.FA3_AVAILABLE else str(flash_attn_interface.FA3_UNAVAILABLE_REASON)

    def decode(self, copies: PagedCopies) -> Prepared:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        dtype = torch.bfloat16 if self.bits == 16 else FP8
        q, caches = copies.inputs.q.to(dtype), [cache.to(dtype) for cache in copies.paged]
        n_rows, longest = len(copies.inputs.rows), max(copies.inputs.lengths)
        starts = torch.arange(n_rows + 1, device="cuda", dtype=torch.int32)
        plan = get_scheduler_metadata(
            batch_size=n_rows,
            max_seqlen_q=1,
            max_seqlen_k=longest,
            num_heads_q=Q_HEADS,
            num_heads_kv=KV_HEADS,
            headdim=DIM,
            cache_seqlens=copies.lengths,
            qkv_dtype=dtype,
            cu_seqlens_q=starts,
            page_size=PAGE,
            causal=True,
            num_splits=0,
        )
        ones = torch.ones(n_rows, KV_HEADS, device="cuda")
        scales = {} if self.bits == 16 else {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        out = torch.empty(n_rows, Q_HEADS, DIM, device="cuda", dtype=torch.bfloat16)

        def call(cache: torch.Tensor) -> None:
            flash_attn_varlen_func(
                q,
                cache[:, 0],
                cache[:, 1],
                1,
                starts,
                longest,
                seqused_k=copies.lengths,
                causal=True,
                block_table=copies.table,
                out=out,
                fa_version=3,
                scheduler_metadata=plan,
                **scales,
            )

        calls = [lambda cache=cache: call(cache) for cache in caches]  # type: ignore[misc]
        return Prepared(calls, lambda: out, copies.inputs.bytes_16 * self.bits // 16)

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Call, Callable[[], torch.Tensor]]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        starts = torch.tensor([0, q.shape[0]], device="cuda", dtype=torch.int32)
        k_starts = torch.tensor([0, k.shape[0]], device="cuda", dtype=torch.int32)
        out = torch.empty_like(q)

        def call() -> None:
            flash_attn_varlen_func(
                q, k, v, q.shape[0], starts, k.shape[0], cu_seqlens_k=k_starts, causal=True, out=out, fa_version=3
            )

        return call, lambda: out


class FlashInferPeer(Peer):
    """What needs the flashinfer package."""

    prefix: str

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"{self.prefix} " + ("bf16" if bits == 16 else "fp8")

    def missing(self) -> str:
        return "" if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"

    def caches(self, copies: PagedCopies) -> list[torch.Tensor]:
        return copies.paged if self.bits == 16 else [cache.to(FP8) for cache in copies.paged]


class FlashInfer(FlashInferPeer):
    """FlashInfer's paged decode on tensor cores; planned once, outside the graph."""

    prefix = "FlashInfer"

    def decode(self, copies: PagedCopies) -> Prepared:
        import flashinfer

        n_pages = [0, *(len(pages) for pages in copies.order)]
        starts = torch.tensor(n_pages, device="cuda").cumsum(0).int()
        last = (copies.lengths - 1) % PAGE + 1
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
        caches = self.caches(copies)
        wrapper.plan(
            starts,
            torch.cat(copies.order),
            last.int(),
            Q_HEADS,
            KV_HEADS,
            DIM,
            PAGE,
            q_data_type=torch.bfloat16,
            kv_data_type=caches[0].dtype,
        )
        out = torch.empty_like(copies.inputs.q)
        calls = [lambda cache=cache: wrapper.run(copies.inputs.q, cache, out=out) for cache in caches]
        return Prepared(calls, lambda: out, copies.inputs.bytes_16 * self.bits // 16)


class Xqa(FlashInferPeer):
    """XQA of TensorRT-LLM as FlashInfer ships it."""

    prefix = "XQA"

    def decode(self, copies: PagedCopies) -> Prepared:
        from flashinfer.xqa import xqa

        n_rows = len(copies.inputs.rows)
        caches = [(cache[:, 0].contiguous(), cache[:, 1].contiguous()) for cache in self.caches(copies)]
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        semaphores = torch.zeros(8 << 20, dtype=torch.uint32, device="cuda")
        q, out = (torch.empty_like(copies.inputs.q).view(n_rows, 1, Q_HEADS, DIM) for _ in range(2))
        q.copy_(copies.inputs.q[:, None])
        lengths = copies.lengths.to(torch.uint32).view(n_rows, 1)

        def call(k: torch.Tensor, v: torch.Tensor) -> None:
            xqa(
                q,
                k,
                v,
                copies.table,
                lengths,
                out,
                workspace,
                semaphores,
                KV_HEADS,
                PAGE,
                q_scale=1.0,
                kv_scale=1.0,
                kv_layout="NHD",
            )

        calls = [lambda k=k, v=v: call(k, v) for k, v in caches]  # type: ignore[misc]
        return Prepared(calls, lambda: out[:, 0], copies.inputs.bytes_16 * self.bits // 16)


def all_peers() -> Sequence[Peer]:
    return (
        TorchPeer("cuDNN SDPA bf16", SDPBackend.CUDNN_ATTENTION),
        TorchPeer("flash SDPA bf16", SDPBackend.FLASH_ATTENTION),
        FlashAttention3(16),
        FlashAttention3(8),
        FlashInfer(16),
        FlashInfer(8),
        Xqa(16),
        Xqa(8),
    )


def copies_for(inputs: Inputs) -> int:
    """Copies of the 16-bit cache that take turns: at least 4, and 3 GB where they are small."""
    return int(max(4, min(24, 3e9 // (sum(inputs.lengths) * TOKEN_BYTES_16))))
