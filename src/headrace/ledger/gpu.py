"""What a GPU does at best, measured as ledger/machine.py does for a processor."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial

from headrace.ledger.machine import FORMAT, MachineFacts, _load, _parse, cache_dir, write_json_atomic

_READ_BYTES = 1 << 30
_SIZE = 8192
_REPEATS = 5


def measure_gpu(name: str) -> MachineFacts:
    """Read bandwidth of a sum over 1 GiB and the FLOP rate of a bfloat16 product."""
    import torch

    values = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device="cuda")
    matrix = torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16, device="cuda")
    seconds = []
    for run in (values.sum, partial(torch.matmul, matrix, matrix)):
        run()
        best = float("inf")
        for _ in range(_REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        seconds.append(best)
    del values, matrix
    torch.cuda.empty_cache()
    return MachineFacts(name, _READ_BYTES / seconds[0], 2.0 * _SIZE**3 / seconds[1], 1, time.time())


def gpu_machine_facts(name: str) -> MachineFacts:
    """This GPU's rates, from the cache file or measured now and stored there."""
    path, key = cache_dir() / "machine.json", f"{name} | format {FORMAT}"
    stored = _load(path)
    facts = _parse(stored.get(key))
    if facts is None:
        facts = measure_gpu(name)
        write_json_atomic(path, {"format": FORMAT, "machines": {**stored, key: asdict(facts)}})
    return facts
