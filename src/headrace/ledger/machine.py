"""What this machine can do at best: bytes it reads a second and float32 operations it does a second.

The ledger holds a step against these two rates (a roofline, Williams et al. 2009) and the cost model starts from them.
They are measured, never looked up, once per machine, and kept in `machine.json` in the cache folder. What a step has
reached is a rate the machine has: it raises the roof at once, and for later runs too where no cache can explain it. The
file is a convenience: missing, corrupt, of another version or unwritable, it is measured again and work goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1  # of machine.json and of how rates are measured; another number means measure again
BUSY = 0.8  # `granted` below this: the rates may be those of a machine shared with others
RETRY_AFTER = 600.0  # seconds before busy facts are measured again
RAISE = 1.05  # rates that steps reached are kept for later runs when they are so much above the kept ones
_MIB = 1 << 20


@dataclass(frozen=True)
class MachineFacts:
    """Measured rates of one device, as used by `num_threads` threads."""

    device_name: str
    read_bandwidth: float  # bytes/s: streaming read from memory, all threads
    flops: float  # float32 FLOP/s of a large matrix product; a multiply-add counts as two
    num_threads: int
    measured_at: float  # seconds since the epoch
    cache_bytes: int = 0  # last-level cache; 0: unknown
    granted: float = 1.0  # processor time got / asked for while measuring; well below 1: others used the machine too
    arithmetic: str = ""  # of steps that may raise the rates, if another than usual: "int8"

    def __post_init__(self) -> None:
        for name in ("read_bandwidth", "flops"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, not {value!r}")

    @property
    def crossing(self) -> float:
        """FLOP per byte read where the two limits cross: below it memory bounds the work, above it arithmetic does."""
        return self.flops / self.read_bandwidth


def cache_dir() -> Path:
    """Folder of everything Headrace remembers between runs: `$HEADRACE_HOME`, else `~/.cache/headrace`."""
    home = os.environ.get("HEADRACE_HOME")
    return Path(home) if home else Path(os.path.expanduser("~")) / ".cache" / "headrace"


def available_threads() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name as the system tells it; never empty."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip() or platform.machine()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def last_level_cache() -> int:
    """Bytes of the largest cache that processor 0 sees; 0 when the system does not say."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
            largest = max(largest, int(text.rstrip("KMG")) * scale)
        except (OSError, ValueError):
            continue
    return largest


def _best_rate(work: float, run: Callable[[], object], budget: float) -> float:
    """`work` per second in the fastest of several calls of `run` made within `budget` seconds (two calls at least).

    The fastest, because anything else that runs on the machine can only slow a call down, and a roof is wanted.
    """
    run()  # warms up: pages, clocks, the library's threads
    best = math.inf
    end = time.perf_counter() + budget
    for index in range(1000):
        start = time.perf_counter()
        if index >= 2 and start >= end:
            break
        run()
        best = min(best, time.perf_counter() - start)
    return work / max(best, 1e-9)


def measure_read_bandwidth(num_threads: int, cache_bytes: int, budget: float = 0.12) -> float:
    """Bytes/s that `num_threads` threads read together from arrays that the last-level cache cannot hold.

    Each thread runs a dot product over an array of its own: one streaming pass, and numpy releases the GIL in it.
    """
    total = min(max(8 * cache_bytes, 128 * _MIB), 1024 * _MIB)
    length = total // num_threads // 4
    with ThreadPoolExecutor(num_threads) as pool:
        # filled by the threads, so that the pages lie on the nodes that read them
        arrays = list(pool.map(lambda _: np.ones(length, np.float32), range(num_threads)))
        return _best_rate(4.0 * length * num_threads, lambda: list(pool.map(_square, arrays)), budget)


def _square(a: np.ndarray) -> float:
    return float(np.dot(a, a))


def measure_flops(budget: float = 0.12, size: int = 768) -> float:
    """float32 FLOP/s of numpy's product of two `size` x `size` matrices, with the threads numpy gives it."""
    a = np.full((size, size), 0.5, np.float32)
    out = np.empty_like(a)
    return _best_rate(2.0 * size**3, lambda: np.matmul(a, a, out=out), budget)


def measure(num_threads: int | None = None) -> MachineFacts:
    """Measure this machine's processor; takes about half a second. `num_threads` defaults to all it may use."""
    threads = num_threads or available_threads()
    cache_bytes = last_level_cache()
    wall, used = time.perf_counter(), time.process_time()
    bandwidth = measure_read_bandwidth(threads, cache_bytes)
    wall, used = time.perf_counter() - wall, time.process_time() - used
    flops = measure_flops()
    return MachineFacts(
        device_name=cpu_name(),
        read_bandwidth=bandwidth,
        flops=flops,
        num_threads=threads,
        measured_at=time.time(),
        cache_bytes=cache_bytes,
        granted=min(used / max(wall * threads, 1e-9), 1.0),
    )


def machine_key(num_threads: int | None = None, arithmetic: str = "") -> str:
    """Names what the rates depend on: processor, threads, numpy, how we measure and how steps compute."""
    threads = num_threads or available_threads()
    key = f"{cpu_name()} | {threads} threads | numpy {np.__version__} | format {FORMAT}"
    return f"{key} | {arithmetic}" if arithmetic else key


def write_json_atomic(path: Path, value: Any) -> bool:
    """Write `value` so that a reader sees the old file or the new one, never a part. False when it cannot be done."""
    name = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, allow_nan=False)
        os.replace(name, path)
        return True
    except (OSError, ValueError):
        if name:
            with contextlib.suppress(OSError):  # gone already: nothing of ours is in the way
                os.unlink(name)
        return False


def read_json(path: Path) -> Any:
    """The file's value, or None when it is missing, unreadable or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _load(path: Path) -> dict[str, Any]:
    """The stored machines by key; {} when the file does not hold them."""
    stored = read_json(path)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT or not isinstance(stored.get("machines"), dict):
        return {}
    return stored["machines"]


def _parse(entry: Any) -> MachineFacts | None:
    """Facts from a stored entry, or None when a value in it cannot be one."""
    try:
        return MachineFacts(
            device_name=str(entry["device_name"]),
            read_bandwidth=float(entry["read_bandwidth"]),
            flops=float(entry["flops"]),
            num_threads=int(entry["num_threads"]),
            measured_at=float(entry["measured_at"]),
            cache_bytes=int(entry["cache_bytes"]),
            granted=float(entry["granted"]),
            arithmetic=str(entry.get("arithmetic", "")),
        )
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        return None


_lock = threading.Lock()
_known: dict[tuple[Path, str], MachineFacts] = {}  # this process's answers: an unwritable cache costs one measurement


def _better(new: MachineFacts, old: MachineFacts | None) -> MachineFacts:
    """`new`, with the higher of both rates: a roof that was reached once is real."""
    if old is None:
        return new
    return replace(new, read_bandwidth=max(new.read_bandwidth, old.read_bandwidth), flops=max(new.flops, old.flops))


def reached(facts: MachineFacts, num_bytes: float, flops: float, seconds: float) -> MachineFacts:
    """`facts`, raised to what a step with so many bytes and operations reached in `seconds` of its model's stages."""
    if not seconds > 1e-5:  # a clock that coarse, or a step that ran no model, tells nothing
        return facts
    bandwidth, rate = num_bytes / seconds, flops / seconds
    if not (facts.read_bandwidth < bandwidth < math.inf or facts.flops < rate < math.inf):
        return facts
    return replace(facts, read_bandwidth=max(facts.read_bandwidth, bandwidth), flops=max(facts.flops, rate))


def lasting(facts: MachineFacts, num_bytes: float, flops: float, seconds: float) -> MachineFacts:
    """As `reached`, but only by what later runs may be held against: steps of a millisecond or more, and bytes that the
    last-level cache cannot have held."""
    if seconds < 1e-3:
        return facts
    return reached(facts, num_bytes if 0 < 2 * facts.cache_bytes < num_bytes else 0.0, flops, seconds)


def remember(facts: MachineFacts) -> None:
    """Keep the rates of `facts`, which came from `machine_facts` and which steps have raised, for later runs."""
    path, key = cache_dir() / "machine.json", machine_key(facts.num_threads, facts.arithmetic)
    with _lock:
        known = _known.get((path, key))
        if known is None or known.device_name != facts.device_name:
            return
        if max(facts.read_bandwidth / known.read_bandwidth, facts.flops / known.flops) <= RAISE:
            return
        stored = _load(path)
        _known[path, key] = best = _better(_better(known, facts), _parse(stored.get(key)))
        write_json_atomic(path, {"format": FORMAT, "machines": {**stored, key: asdict(best)}})


def machine_facts(num_threads: int | None = None, *, refresh: bool = False, arithmetic: str = "") -> MachineFacts:
    """This machine's rates, from this process, else from the cache file, else measured now and stored.

    `arithmetic`: of steps with cheaper operations than usual: what those reach, others are not held against.
    Facts taken on a busy machine are measured again after a while, and the better rates kept. `refresh` measures anyway
    and forgets the old rates. Never fails because of the file.
    """
    path, key = cache_dir() / "machine.json", machine_key(num_threads, arithmetic)
    with _lock:
        facts = None if refresh else _known.get((path, key))
        if facts is not None:
            return facts
        stored = None if refresh else _parse(_load(path).get(key))
        if stored is not None and not (stored.granted < BUSY and time.time() - stored.measured_at > RETRY_AFTER):
            facts = stored
        else:
            facts = _better(replace(measure(num_threads), arithmetic=arithmetic), stored)
            write_json_atomic(path, {"format": FORMAT, "machines": {**_load(path), key: asdict(facts)}})
        _known[path, key] = facts
        return facts
