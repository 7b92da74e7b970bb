"""Put the measured tables into README.md from the committed results, so that no number there is typed by hand.

python benchmarks/readme_tables.py           rewrite README.md
python benchmarks/readme_tables.py --check   exit 1 if it does not match the results
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


TABLES = {"attention": attention_table, "quality": quality_table}


def render(text: str) -> str:
    """README text with every `<!-- table NAME -->` block filled in anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if pattern.search(text):
            text = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)  # type: ignore[misc]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = render(before)
    if args.check:
        if before != after:
            print(
                "README.md does not match benchmarks/results; run python benchmarks/readme_tables.py", file=sys.stderr
            )
        return int(before != after)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
