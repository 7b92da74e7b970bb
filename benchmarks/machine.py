"""What every benchmark needs: the machine line, fair timing of alternatives, JSON results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any


def cpu_name() -> str:
    """Model name of the processor, as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def cpu_features() -> list[str]:
    """The instruction sets that matter here."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    return [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if name in flags]


def commit() -> str:
    """Commit of the checkout, with + if it has changes; "unknown" outside one.

    HYBRIDKV_COMMIT goes first: for a copy of the files on a machine that has no checkout.
    """
    if named := os.environ.get("HYBRIDKV_COMMIT"):
        return named
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def command_line() -> str:
    """How this program was called, but for where its results go."""
    words = ["python", *sys.argv]
    for flag in ("-o", "--out"):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    return " ".join(words)


def machine_line(threads: int) -> dict[str, Any]:
    """Everything one needs to know to read a result."""
    import torch

    import hybridkv

    return {
        "cpu": cpu_name(),
        "features": cpu_features(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hybridkv": hybridkv.__version__,
        "commit": commit(),
        "command": command_line(),
        "date": time.strftime("%Y-%m-%d"),
    }


def time_alternating(
    calls: dict[str, Callable[[], object]], rounds: int, warmup: int = 1, settle: int = 5, burst: int = 20
) -> dict[str, dict[str, float]]:
    """Milliseconds of every call, the calls taking turns so that a slow moment of the machine hits all of them.

    A turn is a pause, `settle` calls that do not count and `burst` calls that do: thread pools keep their workers
    spinning for a while after a call, which would otherwise be charged to whoever comes next.

    Returns
    -------
    dict
        Per name `median`, `min` and `max` in ms.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_idx in range(warmup + rounds):
        for name, call in calls.items():
            time.sleep(0.05)
            for _ in range(settle):
                call()
            for _ in range(burst):
                start = time.perf_counter()
                call()
                elapsed = (time.perf_counter() - start) * 1e3
                if round_idx >= warmup:
                    samples[name].append(elapsed)
    return {name: {"median": median(ms), "min": min(ms), "max": max(ms)} for name, ms in samples.items()}


def read_bandwidth(threads: int, megabytes: int = 1024) -> float:
    """GB/s of summing a large array with torch: the ceiling for anything that only reads."""
    import torch

    data = torch.ones(megabytes * 2**20 // 8, dtype=torch.int64)
    torch.set_num_threads(threads)
    best = min(time_alternating({"sum": data.sum}, rounds=5)["sum"].items(), key=lambda item: item[1])[1]
    return megabytes * 2**20 / best / 1e6


def save(path: str | None, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write {"machine": ..., "rows": ...}; nothing if path is None."""
    if path:
        Path(path).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
