"""Prefill attention by PyTorch on the shapes of cuda_prefill.cu: times, and errors against double precision.

    python benchmarks/cuda_prefill_peers.py [-o FILE.json]

Where older tokens precede the chunk, cuDNN has no aligned causal mask in PyTorch; its time is that of the older part
without a mask plus that of the chunk, without the merge that a user of it would need: a lower bound.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

Q_HEADS, KV_HEADS, COPIES = 32, 8, 4
SHAPES = [(1, 0, 2048, 128), (1, 30720, 2048, 128), (1, 0, 8192, 128), (4, 4096, 512, 128), (1, 131072, 64, 128)]
SHAPES += [(1, 0, 2048, 64), (1, 30720, 2048, 64), (1, 0, 2048, 256), (1, 30720, 2048, 256)]


def time_graph(run: Callable[[int], object], n: int = 8) -> float:
    """Return the median time of `run` in microseconds, inside a CUDA graph of n calls."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            run(i % COPIES)
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / n)
    return statistics.median(times)


def peers(batch: int, older: int, n_new: int, dim: int) -> dict[str, float]:
    """Return times of one shape."""
    q = torch.randn(batch, Q_HEADS, n_new, dim, device="cuda", dtype=torch.bfloat16)
    caches = [
        tuple(torch.randn(batch, KV_HEADS, older + n_new, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        for _ in range(COPIES)
    ]
    causal = partial(functional.scaled_dot_product_attention, q, is_causal=True, enable_gqa=True)
    plain = partial(functional.scaled_dot_product_attention, q, enable_gqa=True)

    def cudnn(i: int) -> None:
        k, v = caches[i]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            if older:
                plain(key=k[:, :, :older], value=v[:, :, :older])
            causal(key=k[:, :, older:], value=v[:, :, older:])

    def flash(i: int) -> None:
        k, v = caches[i]
        mask = causal_lower_right(n_new, older + n_new)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    times = {}
    for name, run in (("cudnn", cudnn), ("flash", flash)):
        try:
            times[name] = time_graph(run)
        except RuntimeError as error:
            print(f"{name} failed: {str(error)[:200]}")
    return times


def errors(dtype: torch.dtype) -> dict[str, float]:
    """Return the relative error of causal attention over 1,024 tokens for three kinds of data, as in check_prefill."""
    results = {}
    for kind in ("normal", "small values with a sink", "keys at 200"):
        q, k, v = (torch.randn(1, Q_HEADS, 1024, 128, device="cuda") for _ in "qkv")
        if kind == "small values with a sink":
            v *= 0.02
            k[:, :, 0] = 1.06 * q[:, :, 0]
        if kind == "keys at 200":
            k[..., 7] = 200 + torch.rand_like(k[..., 7]) - 0.5
        q, k, v = (x.to(dtype) for x in (q, k, v))
        want = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            got = functional.scaled_dot_product_attention(q, k, v, is_causal=True).double()
        results[kind] = ((got - want).norm() / want.norm()).item()
    return results


def main() -> None:
    """Print times and errors, write them if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for batch, older, n_new, dim in SHAPES:
        times = peers(batch, older, n_new, dim)
        print(f"{batch} x {n_new} over {older} D {dim}: " + ", ".join(f"{k} {t:.1f} us" for k, t in times.items()))
        rows.append({"batch": batch, "older": older, "n_new": n_new, "dim": dim, **times})
    for dtype in (torch.float16, torch.bfloat16):
        print(dtype, errors(dtype))
        rows.append({"dtype": str(dtype), "errors": errors(dtype)})
    if args.output:
        with open(args.output, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
