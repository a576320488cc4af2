"""What this machine gives a process: threads and memory, as affinity, cgroups and its own limits leave them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.device.cgroup import CgroupLimits, cgroup_limits

_ROOT = Path("/")


@dataclass(frozen=True)
class CpuFacts:
    """Measured limits of this process."""

    num_threads: int
    available_memory: int  # bytes that can still be used without swapping
    total_memory: int  # bytes the process may ever use


def _sizes(path: Path) -> dict[str, int]:
    """Lines `Name: 12 kB` in bytes."""
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def num_threads(limits: CgroupLimits | None = None) -> int:
    """Processors this process may use: its affinity, cut by the quota of its cgroups (`limits`; None: look)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = cgroup_limits(_ROOT) if limits is None else limits
    return count if limits.processors is None else min(count, max(1, int(limits.processors)))


def _process_limits() -> list[tuple[int, int]]:
    """(bytes allowed, bytes taken) of the limits that `ulimit -d` and `ulimit -v` set."""
    try:
        import resource
    except ImportError:  # Windows
        return []
    status = _sizes(_ROOT / "proc/self/status")
    found = []
    for kind, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            found.append((limit, status.get(used, 0)))
    return found


def cpu_facts() -> CpuFacts:
    """Threads and memory as they are now."""
    memory = _sizes(_ROOT / "proc/meminfo")
    total = memory.get("MemTotal", 4 << 30)
    available = memory.get("MemAvailable", total // 2)
    limits = cgroup_limits(_ROOT)
    for limit, used in (*limits.memory, *_process_limits()):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return CpuFacts(num_threads(limits), available, total)
