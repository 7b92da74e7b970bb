"""What benchmarks on a GPU need: times of calls inside CUDA graphs, the read ceiling, the machine line."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from machine import command_line, commit

Call = Callable[[], object]

MIN_LAUNCHES = 20
"""A graph has at least so many launches, so that its own start does not count."""


def stream_address() -> int:
    """Address of the stream that torch works on now; inside a capture the captured one."""
    return int(torch.cuda.current_stream().cuda_stream)


def repeated(calls: Sequence[Call]) -> list[Call]:
    """The calls in turns, at least `MIN_LAUNCHES` of them."""
    return list(calls) * -(-MIN_LAUNCHES // len(calls))


def time_graph(calls: Sequence[Call], replays: int = 15, warmup: int = 3) -> float:
    """Microseconds a call: median over replays of one CUDA graph of all of them. They must have run once before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        for call in calls:
            call()
    times = []
    for replay in range(warmup + replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= warmup:
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return median(times)


class ReadCeiling:
    """Microseconds of a plain read, by the number of bytes; measured once for each."""

    def __init__(self, n_bytes: int = 4 << 30) -> None:
        from read_ceiling import Reader

        self.reader = Reader(n_bytes)
        self.known: dict[int, float] = {}

    def microseconds(self, n_bytes: int) -> float:
        """The fastest of several ways to read so many bytes, to the next 100 KB."""
        size = max(1, round(n_bytes / 1e5)) * 100_000
        if size not in self.known:
            self.known[size] = min(self.time(size, shape) for shape in self.shapes())
        return self.known[size] * n_bytes / size

    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        from read_ceiling import SHAPES

        return SHAPES

    def time(self, n_bytes: int, shape: tuple[int, int, int]) -> float:
        calls = self.reader.calls(n_bytes, MIN_LAUNCHES, shape)
        calls[0]()  # compiles
        return time_graph(calls, replays=7)


def smi(*fields: str) -> list[str]:
    """Fields of the first GPU as nvidia-smi prints them; "unknown" without it."""
    try:
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ["unknown"] * len(fields)
    return [field.strip() for field in done.stdout.split(",")]


def version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_line(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Everything one needs to know to read a result."""
    driver, clock, max_clock, memory_clock, temperature, throttled = smi(
        "driver_version",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
        "temperature.gpu",
        "clocks_event_reasons.active",
    )
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver,
        "cuda": torch.version.cuda,
        "clocks": f"SM {clock} of {max_clock}, memory {memory_clock}, not fixed",
        "temperature": temperature,
        "throttle_reasons": throttled,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: found for name in packages if (found := version(name))},
        "commit": commit(),
        "command": command_line(),
        "date": time.strftime("%Y-%m-%d"),
    }
