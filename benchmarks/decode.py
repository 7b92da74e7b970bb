"""Attention on a GPU beside every peer that is installed, in one run: decode, progressive, sparse, append, prefill.

    python benchmarks/decode.py                                    everything
    python benchmarks/decode.py --cases B32x8K append -o FILE.json rows of works whose name contains one of these
    python benchmarks/decode.py --peers XQA                        these peers only; "none" for none

32 query and 8 KV heads, head size 128, bfloat16. A time is microseconds a call inside a CUDA graph of at least 20 calls
over caches that take turns, so that L2 is cold and no launch from Python counts; merging of partial results is in it.
"read" is a plain read of as many bytes in the same run. Error is relative to float64 on the exact keys and values;
"stored" for hybridkv is relative to float64 on what its records hold. Ratios are against the fastest 16-bit peer.
Decode times leave the writing of the new token out for all; for hybridkv that has rows of its own. Next to the JSON a
plot is drawn if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu import MIN_LAUNCHES, ReadCeiling, machine_line, repeated, time_graph
from gpu_inputs import (
    KV_HEADS,
    PAGE,
    Q_HEADS,
    Inputs,
    concentrated_inputs,
    exact,
    normal_inputs,
    relative_error,
)
from gpu_peers import PagedCopies, Peer, UnsupportedError, all_peers, copies_for

BITS_NAMES = {8: "INT8", 6: "K8V4", 4: "INT4", 0: "bits 0"}
RECORD_BYTES = {8: 17216, 6: 13120, 4: 9024}
READ_BYTES_PER_US = 4.53e6
"""Of an H200, for the goals of the skewed batch."""


@dataclass
class Row:
    """One measured time. `must` and `aim` are goals in microseconds, 0 = none; negative errors = not checked."""

    work: str
    name: str
    us: float
    n_bytes: int = 0
    read_us: float = 0.0
    error: float = -1.0
    stored_error: float = -1.0
    ratio: float = 0.0
    must: float = 0.0
    aim: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Variant:
    """hybridkv in one setting, and its goals."""

    bits: int
    must: float = 0.0
    aim: float = 0.0


@dataclass(frozen=True)
class Shape:
    """Sequences to decode, by their lengths with the new token."""

    name: str
    lengths: list[int]
    variants: tuple[Variant, ...]


def skewed_goal(factor: float, extra: float) -> float:
    n_records = (65536 + 31 * 4096) / PAGE * KV_HEADS
    return round(factor * n_records * RECORD_BYTES[8] / READ_BYTES_PER_US + extra, 1)


SHAPES = (
    Shape(
        "B32x8K",
        [8192] * 32,
        (Variant(8, 135, 132), Variant(6, 113, 104), Variant(4, 81, 73), Variant(0, 256, 245)),
    ),
    Shape("B1x128K", [131072], (Variant(8, 73, 67), Variant(6), Variant(4, 46, 38), Variant(0))),
    Shape("B4x2K", [2048] * 4, (Variant(8, 12, 9.5), Variant(6), Variant(4), Variant(0))),
    Shape("B1x4K", [4096], (Variant(8, 8.5, 7), Variant(6), Variant(4), Variant(0))),
    Shape("1x64K + 31x4K", [65536] + [4096] * 31, (Variant(8, skewed_goal(1.15, 6), skewed_goal(1.05, 5)),)),
    Shape("B8x32K", [32768] * 8, (Variant(8, 138, 133), Variant(6), Variant(4), Variant(0))),
)


class Bench:
    """Collects rows, and what could not be measured with the reason."""

    def __init__(self, peers: list[Peer], hybrid_missing: str) -> None:
        self.ceiling = ReadCeiling()
        self.rows: list[Row] = []
        self.missing = {peer.name: reason for peer in peers if (reason := peer.missing())}
        self.peers = [peer for peer in peers if peer.name not in self.missing]
        if hybrid_missing:
            self.missing["hybridkv"] = hybrid_missing
        self.has_hybrid = not hybrid_missing

    def add(self, row: Row) -> None:
        if row.n_bytes:
            row.read_us = self.ceiling.microseconds(row.n_bytes)
        best = self.best_16_bit(row.work)
        row.ratio = best / row.us if best else 0.0
        self.rows.append(row)
        print(describe(row), flush=True)

    def best_16_bit(self, work: str) -> float:
        """The fastest 16-bit peer at the shape of a work, 0 if there is none."""
        names = {peer.name for peer in self.peers if peer.bits == 16}
        return min((row.us for row in self.rows if row.work == work and row.name in names), default=0.0)

    def attempt(self, work: str, name: str, measure: Callable[[], Row]) -> None:
        """Add what `measure` gives, or note why it could not."""
        try:
            self.add(measure())
        except Exception as error:  # one call that fails must not take the others' results along
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.missing[f"{name}, {work}"] = str(error) if isinstance(error, UnsupportedError) else reason
            print(f"{work:16} {name:24} -- {self.missing[f'{name}, {work}']}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def describe(row: Row) -> str:
    """One line for people."""
    text = f"{row.work:16} {row.name:28} {row.us:8.1f} us"
    text += f" {row.ratio:5.2f}x" if row.ratio else "       "
    if row.n_bytes:
        text += (
            f"  {row.n_bytes / 1e6:7.1f} MB {row.n_bytes / row.us / 1e6:5.2f} TB/s {row.read_us / row.us:4.0%} of read"
        )
    if row.error >= 0:
        text += f"  error {row.error:.1e}"
    if row.stored_error >= 0:
        text += f" (stored {row.stored_error:.1e})"
    if row.must:
        text += "  " + ("aim met" if row.us <= row.aim else "must met" if row.us <= row.must else "MISSED")
        text += f" ({row.must:g}/{row.aim:g})"
    return f"{text}  {row.note}".rstrip()


# ----------------------------------------------------------------------------------------------------------- decode


def peer_row(work: str, peer: Peer, copies: PagedCopies) -> Row:
    """One peer at one shape."""
    prepared = peer.decode(copies)
    prepared.calls[0]()
    error = relative_error(prepared.out(), copies.inputs.expected)
    for call in prepared.calls[1:]:
        call()
    return Row(work, peer.name, time_graph(repeated(prepared.calls)), prepared.n_bytes, error=error)


def hybrid_row(work: str, name: str, inputs: Inputs, settings: Any, goal: Variant, sparse: bool = False) -> Row:
    """hybridkv at one shape and setting: attention alone, nothing is written."""
    from gpu_hybrid import Layers, StepOf, stored_error, to_l2

    held = [length - 1 for length in inputs.lengths]
    layers = Layers(settings, inputs.rows, held, n_layers=max(MIN_LAUNCHES, copies_for(inputs)))
    if sparse:
        to_l2(layers)
    step = StepOf(layers, held, inputs.lengths, writes=False)
    out = torch.full_like(inputs.q, torch.nan)
    counters = layers.store.counters()
    step.begin()
    for call in step.attends(inputs.q, out):
        call()
    torch.cuda.synchronize()
    counted = {key: value - counters[key] for key, value in layers.store.counters().items()}
    error = relative_error(out, inputs.expected)
    stored = stored_error(layers, inputs, out) if is_plain(settings) and not sparse else -1.0
    step.begin()
    us = time_graph(step.attends(inputs.q, out))
    n_bytes = int(counted["n_bytes_read"] / layers.n_layers)
    return Row(work, name, us, n_bytes, 0.0, error, stored, must=goal.must, aim=goal.aim, note=shares(counted))


def is_plain(settings: Any) -> bool:
    """Whether every record is read at full precision."""
    return not settings.skip_mass and not settings.refine_mass


def shares(counted: dict[str, Any]) -> str:
    """What progressive and sparse reading left out."""
    n_read, n_unselected = counted["n_records_read"], counted["n_records_unselected"]
    text = []
    if counted["n_records_skipped"]:
        text.append(
            f"{counted['n_records_skipped'] / n_read:.0%} skipped, {counted['n_records_refined'] / n_read:.0%} refined"
        )
    if n_unselected:
        text.append(f"{n_read / (n_read + n_unselected):.1%} of the records read")
    return ", ".join(text)


def measure_peers(bench: Bench, work: str, inputs: Inputs) -> None:
    """All peers at one shape."""
    copies = PagedCopies(inputs, copies_for(inputs))
    for peer in bench.peers:

        def measure(peer: Peer = peer) -> Row:
            return peer_row(work, peer, copies)

        bench.attempt(work, peer.name, measure)


def measure_shape(bench: Bench, shape: Shape) -> None:
    """All peers and all settings of hybridkv at one shape."""
    inputs = normal_inputs(shape.lengths)
    measure_peers(bench, shape.name, inputs)
    if not bench.has_hybrid:
        return
    from gpu_hybrid import config

    for goal in shape.variants:
        name = f"hybridkv {BITS_NAMES[goal.bits]}"

        def measure(goal: Variant = goal, name: str = name) -> Row:
            return hybrid_row(shape.name, name, inputs, config(goal.bits), goal)

        bench.attempt(shape.name, name, measure)


def measure_progressive(bench: Bench, work: str, lengths: list[int], low: float, high: float, goal: Variant) -> None:
    """The default thresholds on data where shares `low` and `high` of the records fall on their far sides."""
    from gpu_hybrid import config

    inputs = concentrated_inputs(lengths, low, high)
    settings = config(8, skip_mass=1e-3, refine_mass=0.05)
    name = f"hybridkv progressive {low:.0%}/{high:.0%}"
    bench.attempt(work, name, lambda: hybrid_row(work, name, inputs, settings, goal))


def measure_sparse(bench: Bench, work: str, n_tokens: int, top_k: int, goal: Variant) -> None:
    """All older blocks in L2, of which the query selects some."""
    from gpu_hybrid import config

    inputs = concentrated_inputs([n_tokens], 0.97, 0.03)
    name = f"hybridkv sparse {top_k} of {n_tokens // PAGE}"
    settings = config(8, top_k=top_k)
    bench.attempt(work, name, lambda: hybrid_row(work, name, inputs, settings, goal, sparse=True))


# --------------------------------------------------------------------------------------------------- append and begin


def append_us(length: int, n_rows: int) -> float:
    """What writing one new token for each row adds to the attend of a layer."""
    from gpu_hybrid import Layers, StepOf, config

    inputs = normal_inputs([length] * n_rows)
    held = [length - 1] * n_rows
    layers = Layers(config(8), inputs.rows, held, n_layers=MIN_LAUNCHES)
    out = torch.empty_like(inputs.q)
    us = []
    for writes in (False, True):
        step = StepOf(layers, held, inputs.lengths, writes)
        step.begin()
        for call in step.attends(inputs.q, out):
            call()
        step.begin()
        us.append(time_graph(step.attends(inputs.q, out)))
    return us[1] - us[0]


def begin_us(length: int, n_rows: int) -> float:
    """Deciding a step in which every row gets one new token."""
    from gpu_hybrid import Layers, StepOf, config

    inputs = normal_inputs([length] * n_rows)
    held = [length - 1] * n_rows
    step = StepOf(Layers(config(8), inputs.rows, held, n_layers=1), held, inputs.lengths)
    step.begin()
    return time_graph([step.begin] * MIN_LAUNCHES)


# ------------------------------------------------------------------------------------------------------------ prefill


def measure_prefill(bench: Bench, work: str, n_new: int, n_cached: int) -> None:
    """A chunk over what is cached; hybridkv appends and seals it too."""
    k, v = (torch.randn(n_cached + n_new, KV_HEADS, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    q = torch.randn(n_new, Q_HEADS, 128, device="cuda").to(torch.bfloat16)
    expected = exact(q, k, v)

    def measure_peer(peer: Peer) -> Row:
        call, out = peer.prefill(q, k, v)
        call()
        return Row(work, peer.name, time_graph([call] * 4), error=relative_error(out(), expected))

    def measure_hybrid(bits: int, name: str) -> Row:
        from gpu_hybrid import Layers, StepOf, config

        layers = Layers(config(bits), [(k, v)], [n_cached], n_layers=4)
        step = StepOf(layers, [n_cached], [n_cached + n_new])
        out = torch.full_like(q, torch.nan)
        step.begin()
        for call in step.attends(q, out):
            call()
        error = relative_error(out, expected)
        step.begin()
        us = time_graph(step.attends(q, out))
        best = bench.best_16_bit(work)
        goal = (1.6 * best, 1.1 * best) if bits == 8 else (0, 0)
        return Row(work, name, us, error=error, must=round(goal[0], 1), aim=round(goal[1], 1))

    for peer in bench.peers:
        if peer.prefills:
            bench.attempt(work, peer.name, lambda peer=peer: measure_peer(peer))  # type: ignore[misc]
    if bench.has_hybrid:
        for bits in (8, 4):
            name = f"hybridkv {BITS_NAMES[bits]}"
            bench.attempt(work, name, lambda bits=bits, name=name: measure_hybrid(bits, name))  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------------- results


def works(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every work by its name."""
    for shape in SHAPES:
        yield shape.name, lambda shape=shape: measure_shape(bench, shape)  # type: ignore[misc]
    if bench.has_hybrid:
        yield from hybrid_works(bench)
    for n_cached, label in ((0, "0"), (30720, "30K")):
        work = f"prefill 2K over {label}"
        yield work, lambda work=work, n=n_cached: measure_prefill(bench, work, 2048, n)  # type: ignore[misc]


def hybrid_works(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    """What no peer does."""
    long, batch = [131072], [8192] * 32
    yield (
        "progressive B32x8K",
        lambda: measure_progressive(bench, "B32x8K", batch, 0.55, 0.12, Variant(8, 80, 66)),
    )
    yield (
        "progressive B1x128K",
        lambda: measure_progressive(bench, "B1x128K", long, 0.90, 0.03, Variant(8, 36, 26)),
    )
    yield "sparse B1x128K", lambda: measure_sparse(bench, "B1x128K", long[0], 128, Variant(8, 22, 17))

    def add(work: str, name: str, us: Callable[[], float], must: float, aim: float) -> Callable[[], None]:
        return lambda: bench.attempt(work, name, lambda: Row(work, name, us(), must=must, aim=aim))

    yield "append B32", add("append B32", "hybridkv append", lambda: append_us(8192 - PAGE // 2, 32), 3, 2)
    yield "seal B32", add("append B32", "hybridkv append, all rows seal", lambda: append_us(8192, 32), 6, 4)
    yield "begin B32x8K", add("begin B32x8K", "hybridkv begin", lambda: begin_us(8192 - PAGE // 2, 32), 10, 5)


def hybrid_missing() -> str:
    """Why hybridkv cannot be measured; "" if it can."""
    try:
        import hybridkv

        hybridkv.Store(
            num_layers=1,
            num_kv_heads=1,
            head_dim=64,
            dtype="bfloat16",
            num_blocks=2,
            max_rows=1,
            max_new_tokens=1,
            device="cuda",
        ).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def chosen(name: str, words: list[str] | None) -> bool:
    return not words or any(word.lower() in name.lower() for word in words)


def draw(rows: list[Row], path: Path) -> None:
    """Bars of the decode times, a panel for each shape; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = [shape.name for shape in SHAPES if any(row.work == shape.name for row in rows)]
    if not shapes:
        return
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(3.4 * len(shapes), 5), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        mine = [row for row in rows if row.work == shape][::-1]
        colors = ["tab:blue" if row.name.startswith("hybridkv") else "tab:gray" for row in mine]
        bars = axis.barh([row.name for row in mine], [row.us for row in mine], color=colors)
        axis.barh([row.name for row in mine], [row.read_us for row in mine], color="none", edgecolor="black")
        axis.bar_label(bars, fmt="%.0f", fontsize=7)
        axis.set_title(f"{shape}, µs", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.margins(x=0.15)
    figure.suptitle("Decode attention; outlined: a plain read of as many bytes", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", metavar="WORD")
    parser.add_argument("--peers", nargs="+", metavar="WORD")
    parser.add_argument("-o", "--out", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("decode.py needs a CUDA GPU and a torch that can use it", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    bench = Bench([peer for peer in all_peers() if chosen(peer.name, args.peers)], hybrid_missing())
    machine = machine_line(("vllm", "flashinfer-python", "triton", "hybridkv"))
    for name, measure in works(bench):
        if not chosen(name, args.cases):
            continue
        measure()
        if args.out:  # after every work, so that a run that is stopped has not been for nothing
            result = {"machine": machine, "missing": bench.missing, "rows": [asdict(row) for row in bench.rows]}
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    for name, reason in bench.missing.items():
        print(f"not measured: {name}: {reason}")
    if args.out:
        draw(bench.rows, Path(args.out).with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
