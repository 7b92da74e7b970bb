"""README does what it says: its tables come from the committed results, its first example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_tables_come_from_the_committed_results() -> None:
    check = [sys.executable, str(ROOT / "benchmarks" / "readme_tables.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_ten_lines_run() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert tuple(names["out"].shape) == (1, 32, 128)  # type: ignore[attr-defined]
    assert names["sequence"].length == 1002  # type: ignore[attr-defined]


def test_results_name_their_machine_and_command() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        text = path.read_text()
        assert '"machine"' in text, path.name
        assert '"command"' in text, path.name
        assert '"commit"' in text, path.name
