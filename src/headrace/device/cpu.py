"""What this machine gives a process: threads and memory, with affinity and cgroup limits respected."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CpuFacts:
    """Measured limits of this process."""

    num_threads: int
    available_memory: int  # bytes that can still be used without swapping
    total_memory: int  # bytes the process may ever use


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    except (OSError, ValueError, IndexError):
        return {}


def num_threads() -> int:
    """Processors this process may use: its affinity, cut by a cgroup quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or no quota ("max")
        pass
    return count


def cpu_facts() -> CpuFacts:
    """Threads and memory as they are now."""
    memory = _meminfo()
    total = memory.get("MemTotal", 4 << 30)
    available = memory.get("MemAvailable", total // 2)
    limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
    if limit is not None:
        total = min(total, limit)
        available = min(available, max(0, limit - (used or 0)))
    return CpuFacts(num_threads(), available, total)
