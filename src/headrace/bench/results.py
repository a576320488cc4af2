"""Results files: what was measured, on what, at which commit. Docs quote only these."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from headrace.device.cpu import cpu_facts
from headrace.ledger.machine import cpu_name, machine_facts


@dataclass
class Row:
    """One case. `ratio` above 1 always means that Headrace is better."""

    case: str  # MODEL FORMAT WORK
    unit: str
    better: Literal["lower", "higher"]
    headrace: float
    peer: float | None = None
    peer_name: str | None = None
    limit_share: float | None = None  # share of the machine's limit that Headrace reaches
    runs: int = 1
    target: float | None = None  # the ratio asked for
    ratio: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.peer is not None:
            better, worse = (self.headrace, self.peer) if self.better == "higher" else (self.peer, self.headrace)
            self.ratio = better / worse

    def line(self) -> str:
        text = f"{self.case:56} {self.headrace:10.2f} {self.unit:8}"
        if self.limit_share is not None:
            text += f" {self.limit_share:4.0%} of the limit"
        if self.ratio is not None:
            text += f" {self.peer_name} {self.peer:.2f}, ratio {self.ratio:.2f}"
        if self.target is not None and self.ratio is not None:
            text += f" (target {self.target:g}: {'reached' if self.ratio >= self.target else 'MISSED'})"
        return text


def environment(*packages: str) -> dict[str, Any]:
    """Hardware, versions and measured limits of this machine."""
    machine, cpu = machine_facts(), cpu_facts()
    versions = {"python": platform.python_version()}
    for name in ("headrace", "numpy", "tokenizers", *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    hardware: dict[str, Any] = {"cpu": cpu_name(), "threads": cpu.num_threads, "memory_bytes": cpu.total_memory}
    torch = sys.modules.get("torch")  # what was measured had it imported, if it ran on a GPU
    if torch is not None and torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name(0)
    return {
        "hardware": hardware,
        "versions": versions,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # of the last minute, this run's included
        "limits": {"read_bandwidth": machine.read_bandwidth, "flops_fp32": machine.flops},
    }


def commit() -> str:
    """The checked-out commit, marked `+` when files differ from it; outside a checkout $HEADRACE_COMMIT, else
    "unknown"."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("HEADRACE_COMMIT", "unknown")


def write_results(
    path: str | Path, name: str, rows: list[Row], *packages: str, more: Mapping[str, Any] | None = None
) -> None:
    """Write a results file, making its folder. `more`: fields beyond the rows."""
    value = {
        "name": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "environment": environment(*packages),
        "rows": [asdict(row) for row in rows],
        **(more or {}),
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
