"""The processor: its features, the threads a process may use, and the code path of the native kernels."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from headrace.device.cgroup import cgroup_limits
from headrace.device.cpu import cpu_facts
from headrace.doctor.section import Section
from headrace.ledger.machine import cpu_name
from headrace.ops.native.library import (
    LIBRARY,
    PATH_STATES,
    available,
    library,
    path_states,
    remedy,
    unavailable_reason,
)

NEEDS = {  # of each code path, as /proc/cpuinfo names them
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
SHOWN = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8",
         "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve")  # fmt: skip


def features(cpuinfo: str) -> frozenset[str]:
    """Feature names in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def processor() -> Section:
    """Name, features, threads and memory."""
    section = Section("Processor")
    found = features(_cpuinfo())
    facts = cpu_facts()
    section.add("name", f"{cpu_name()} ({platform.machine()})")
    section.add("features", " ".join(name for name in SHOWN if name in found) or "unknown")
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    section.add("processors", f"{os.cpu_count()} in the machine, {affinity or 'unknown'} by this process's affinity")
    quota = cgroup_limits().processors
    section.add("cgroup quota", "none" if quota is None else f"{quota:g} processors' worth")
    section.add("threads", f"{facts.num_threads} (--num-threads may lower it)")
    section.add("memory", f"{facts.available_memory / 1e9:.1f} of {facts.total_memory / 1e9:.1f} GB free to use")
    return section


def kernels() -> Section:
    """Which code path runs, and why none better does."""
    section = Section("Native CPU kernels")
    if not available():
        section.add("used", "no: the numpy references run, many times slower")
        section.problems.append(f"{unavailable_reason()}. {remedy()}".rstrip(". ") + ".")
        return section
    chosen, found = library().path, features(_cpuinfo())
    forced = os.environ.get("HEADRACE_NATIVE_PATH")
    section.add("library", LIBRARY)
    section.add("path", f"{chosen}, " + ("forced by HEADRACE_NATIVE_PATH" if forced else "the best that runs here"))
    for path, state in path_states().items():
        lacking = [name for name in NEEDS[path] if found and name not in found]
        reason = f" (it lacks {', '.join(lacking)})" if state == PATH_STATES[1] and lacking else ""
        section.add(f"  {path}", state + reason)
    if "amx_tile" in found:
        section.add("  amx", "the processor has it; there is no such path yet")
    has16 = library().has_int16()
    section.add("mode exact", "float32 throughout")
    section.add(
        "mode default",
        "inputs of quantised weights as 16-bit integers, exact sums of 32 products; keys and values in bf16"
        if has16
        else "float32, since this path has no products of integers; keys and values in bf16",
    )
    return section
