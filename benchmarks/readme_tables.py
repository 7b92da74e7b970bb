"""Put the measured tables into README.md and docs/benchmarks.md from the committed results: no number is typed by hand.

python benchmarks/readme_tables.py           rewrite them
python benchmarks/readme_tables.py --check   exit 1 if one does not match the results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """One committed result: {"machine": {...}, "rows": [...]}."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; every column but the first is right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def machine_note(machine: dict[str, Any]) -> str:
    """The line under a table that says where and how it was measured."""
    return (
        f"{machine['cpu']}, {machine['threads']} threads, {', '.join(machine['features'])}; torch {machine['torch']}; "
        f"`{machine['command']}` at {machine['commit']}, {machine['date']}."
    )


def attention_table() -> str:
    """Decode and prefill on the CPU: milliseconds, and how many times faster than the fastest torch call."""
    result = load("cpu_attention")
    works = [work for work in dict.fromkeys(row["work"] for row in result["rows"]) if not work.startswith("seal")]
    by_work = {work: {row["name"]: row for row in result["rows"] if row["work"] == work} for work in works}
    rows: list[list[str]] = []
    best = []
    for work in works:
        peers = [row for name, row in by_work[work].items() if name.startswith("torch")]
        fastest = min(peers, key=lambda row: row["median"])
        best.append(f"{fastest['median']:.2f} ms")
    rows.append(["fastest torch call, bf16", *best])
    names = list(dict.fromkeys(row["name"] for row in result["rows"] if not row["work"].startswith("seal")))
    for name in names:
        if name.startswith("torch"):
            continue
        cells = []
        for work in works:
            row = by_work[work].get(name)
            cells.append(f"{row['median']:.2f} ms ({row['ratio']:.1f}x)" if row else "")
        rows.append([name, *cells])
    table = markdown(["32/8 heads, D 128", *works], rows)
    return f"{table}\n\n{machine_note(result['machine'])}"


def quality_table() -> str:
    """KL to full precision, and what a record costs, on a real model."""
    result = load("quality")
    kl = {(row["cache"], f"{row['text']}, {row['context']} tokens"): row["mean_kl"] for row in result["rows"]}
    texts = list(dict.fromkeys(text for _, text in kl))
    bytes_per_token = {row["cache"]: row["bytes_per_token_d128"] for row in result["rows"]}
    rows = [
        [cache, *(f"{kl[cache, text]:.1e}" for text in texts), f"{n_bytes:.0f}"]
        for cache, n_bytes in bytes_per_token.items()
    ]
    table = markdown(["mean KL to the exact cache", *texts, "bytes/token/head, D 128"], rows)
    return f"{table}\n\n{machine_note(result['machine'])}"


def gpu_note(machine: dict[str, Any]) -> str:
    """The lines under a GPU table."""
    packages = "".join(f", {name} {found}" for name, found in machine["packages"].items())
    text = (
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, clocks not fixed; torch "
        f"{machine['torch']}{packages}; `{machine['command']}` at {machine['commit']}, {machine['date']}."
    )
    return f"{text} {machine['note']}" if "note" in machine else text


def fastest(rows: list[dict[str, Any]], word: str) -> str:
    """Time and name of the fastest peer whose name ends with a word."""
    peers = [row for row in rows if not row["name"].startswith("hybridkv") and row["name"].endswith(word)]
    if not peers:
        return ""
    best = min(peers, key=lambda row: float(row["us"]))
    return f"{best['us']:.1f} ({best['name'].removesuffix(f' {word}')})"


def gpu_cell(row: dict[str, Any] | None) -> str:
    """A time, its share of a plain read of the bytes and, with peers in the run, how much faster it is than theirs."""
    if row is None:
        return ""
    compared = f", {row['ratio']:.1f}x" if row["ratio"] else ""
    return f"{row['us']:.1f} ({row['read_us'] / row['us']:.0%}{compared})"


def gpu_table() -> str:
    """Decode on the GPU in microseconds."""
    result = load("decode_h200")
    decode = [row for row in result["rows"] if row["n_bytes"]]
    works = list(dict.fromkeys(row["work"] for row in decode))
    by_work = {work: [row for row in decode if row["work"] == work] for work in works}
    rows = []
    for word, label in (("bf16", "fastest 16-bit peer"), ("fp8", "fastest fp8 peer")):
        cells = [fastest(by_work[work], word) for work in works]
        if any(cells):
            rows.append([label, *cells])
    for name in dict.fromkeys(row["name"] for row in decode if row["name"].startswith("hybridkv")):
        mine = [next((row for row in by_work[work] if row["name"] == name), None) for work in works]
        rows.append([name, *map(gpu_cell, mine)])
    return f"{markdown(['µs, 32/8 heads, D 128', *works], rows)}\n\n{gpu_note(result['machine'])}"


def goal_cells(row: dict[str, Any]) -> list[str]:
    """The goals of a row, and which is met."""
    if not row["must"]:
        return ["", ""]
    verdict = "aim" if row["us"] <= row["aim"] else "must" if row["us"] <= row["must"] else "not met"
    return [f"{row['must']:g} / {row['aim']:g}", verdict]


def gpu_rows_table(name: str) -> str:
    """Every row of one run on the GPU."""
    result = load(name)
    rows = []
    for row in result["rows"]:
        errors = [f"{row[key]:.1e}" if row[key] >= 0 else "" for key in ("error", "stored_error")]
        read = [f"{row['n_bytes'] / 1e6:.1f}", f"{row['read_us'] / row['us']:.0%}"] if row["n_bytes"] else ["", ""]
        what = f"{row['name']} ({row['note']})" if row["note"] else row["name"]
        rows.append([row["work"], what, f"{row['us']:.1f}", *read, *errors, *goal_cells(row)])
    header = ["work", "what", "µs", "MB", "of a plain read", "error", "error on stored values", "must / aim", "met"]
    missing = "".join(f"* {what}: {reason}\n" for what, reason in result["missing"].items())
    return f"{markdown(header, rows)}\n\nNot measured:\n\n{missing}\n{gpu_note(result['machine'])}"


TABLES = {
    "attention": attention_table,
    "quality": quality_table,
    "gpu": gpu_table,
    "gpu-rows": lambda: gpu_rows_table("decode_h200"),
}
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")


def render(text: str) -> str:
    """Text of a page with every `<!-- table NAME -->` block filled in anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if pattern.search(text):
            text = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)  # type: ignore[misc]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        before = page.read_text()
        after = render(before)
        if before == after:
            continue
        stale.append(page.name)
        if not args.check:
            page.write_text(after)
    if not args.check or not stale:
        return 0
    print(
        f"{', '.join(stale)} does not match benchmarks/results; run python benchmarks/readme_tables.py",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
