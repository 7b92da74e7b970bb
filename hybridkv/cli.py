"""The command ``hybridkv``."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from . import __version__, _core, cpu_path, cpu_paths, get_num_threads

OPTIONAL_PACKAGES = {
    "torch": "bfloat16 tensors and hybridkv.hf",
    "transformers": "hybridkv.hf",
}


def package_version(name: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def collect_info() -> dict[str, Any]:
    """What this installation can do, and what it lacks and why."""
    devices = [{"name": name, "count": count, "reason": reason} for name, count, reason in _core.devices()]
    packages = {name: package_version(name) for name in ("numpy", *OPTIONAL_PACKAGES)}
    missing = [f"{device['name']}: {device['reason']}" for device in devices if not device["count"]]
    missing += [
        f"{name}: not installed, needed for {purpose} (pip install 'hybridkv[transformers]')"
        for name, purpose in OPTIONAL_PACKAGES.items()
        if packages[name] is None
    ]
    missing += [f"{path}: not supported by this processor" for path, supported in cpu_paths().items() if not supported]
    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_path": cpu_path(),
        "cpu_paths": cpu_paths(),
        "threads": get_num_threads(),
        "devices": devices,
        "packages": packages,
        "missing": missing,
    }


def format_info(info: dict[str, Any]) -> str:
    """The same for people."""
    paths = ", ".join(path for path, supported in info["cpu_paths"].items() if supported)
    devices = ", ".join(f"{device['name']} ({device['count']})" for device in info["devices"] if device["count"])
    packages = ", ".join(f"{name} {version}" for name, version in info["packages"].items() if version)
    lines = [
        f"hybridkv   {info['version']}",
        f"python     {info['python']} on {info['machine']}",
        f"cpu path   {info['cpu_path']} (this machine runs: {paths})",
        f"threads    {info['threads']}",
        f"devices    {devices}",
        f"packages   {packages}",
    ]
    lines += [f"missing    {text}" for text in info["missing"]]
    return "\n".join(lines)


def run_info(args: argparse.Namespace) -> int:
    """``hybridkv info``."""
    info = collect_info()
    print(json.dumps(info, indent=2) if args.json else format_info(info))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="hybridkv", description="A hybrid key/value cache for transformers.")
    parser.add_argument("--version", action="version", version=f"hybridkv {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    info = commands.add_parser("info", help="what this installation can do, and what it lacks and why")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=run_info)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = make_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except _core.Error as error:
        print(f"hybridkv: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
