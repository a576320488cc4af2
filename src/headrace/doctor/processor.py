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
from headrace.ops.native.packed import product

NEEDS = {  # of each code path, as /proc/cpuinfo names them
    "amx": (
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_tile",
        "amx_bf16",
    ),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
_ARITHMETIC = {
    "float32": "float32, since this path has no products of integers",
    "int16": "inputs of quantised weights as 16-bit integers, exact sums of 32 products",
    "bfloat16": "inputs and weights as bfloat16, but for F32 weights, sums in float32",
    "int8": "inputs of quantised weights as 8-bit integers, exact sums of 32 products",
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
        reason = ""
        if state == PATH_STATES[1] and lacking:
            reason = f" (it lacks {', '.join(lacking)})"
        elif state == PATH_STATES[1] and found and path == "amx":
            reason = f" (the system refused this process its tiles, which Linux 5.16 or newer gives; {chosen} runs)"
        elif path == chosen == "amx" and not forced:
            reason = " (one request alone decodes faster with --mode fast)"
        elif state == PATH_STATES[0] and path == "amx":
            reason = " (the compiler knew no AMX and fp16: g++ 12 or newer does)"
        section.add(f"  {path}", state + reason)
    section.add("mode exact", "float32 throughout")
    section.add("mode default", f"{_ARITHMETIC[product('default', 'Q4_1', 1)]}; keys and values in bf16")
    few, many = (product("fast", "Q4_1", tokens) for tokens in (1, 5))
    section.add(
        "mode fast",
        "the same as default here"
        if few == many
        else f"up to 4 tokens at once: {_ARITHMETIC[few]}; more: {_ARITHMETIC[many]}",
    )
    rounded = product("int8", "Q4_1", 1)
    section.add("mode int8", _ARITHMETIC[rounded] if rounded == "int8" else "the same as default here")
    return section
