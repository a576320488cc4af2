"""Runs an engine whose kernels are compiled ahead for a Hopper GPU, without one: kernels do nothing here.

    python ahead_offline.py MODEL [OPTION=VALUE ...]

Prints, as JSON, what was compiled ahead, how often anything was compiled, and the calls that nobody had foreseen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import headrace.frontend.engine as engine_module
from headrace import LLM, SamplingParams
from headrace.device.cuda import GpuFacts
from headrace.ledger.machine import machine_facts
from headrace.ops.triton import runtime
from headrace.worker.rehearsal import compile_ahead


class HopperDriver:
    """What Triton asks of a driver before it launches."""

    launchers = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.launchers += 1


def main() -> None:
    driver.set_active(HopperDriver())
    compiled: Counter[str] = Counter()
    unforeseen: list[str] = []
    seen: set[Any] = set()

    def listen(src: Any, metadata: dict[str, Any], cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            compiled[f"{src.fn.__name__} {metadata['hash']}"] += 1

    def call(self: runtime.Kernel, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        launches = runtime.RUNTIME.launches
        assert launches is not None
        key = self.key(arguments, constants)
        if launches.recording:
            launches.note(self, key, arguments, constants)
            return
        if (id(self), key) in seen:
            return
        seen.add((id(self), key))
        launches.settle(self, key)
        before = compiled.total()
        self.jit.run(*arguments, grid=(1,), warmup=True, **constants)
        if compiled.total() != before:
            unforeseen.append(f"{self.jit.__name__} {key}")

    knobs.compilation.listener = listen
    runtime.Kernel._call = call
    runtime.dependent_launch = lambda: True
    engine_module.choose_gpu = lambda name: GpuFacts("none", (9, 0), 8 << 30, 8 << 30, 132)
    engine_module.gpu_machine_facts = lambda name: machine_facts()
    from headrace.worker.device_worker import DeviceWorker

    found: dict[str, Any] = {}

    def make_worker(spec: Any, checkpoint: Any, config: Any, layout: Any, backend: Any, grammars: Any, draft: Any):
        started = time.perf_counter()
        ahead = compile_ahead(spec, checkpoint, config, layout, backend, draft)
        found["ahead"], found["recorded"] = ahead, time.perf_counter() - started
        if ahead is not None:  # what comes first must not find work undone: here nothing else is to be compiled
            ahead.wait(300)
        cpu = torch.device("cpu")
        return DeviceWorker(spec, checkpoint, config, layout, backend, grammars, cpu, draft, ahead)

    engine_module.make_worker = make_worker
    words = dict(word.split("=") for word in sys.argv[2:])
    options: dict[str, Any] = {
        name: value == "True" if value in ("True", "False") else int(value) if value.isdigit() else value
        for name, value in words.items()
    }
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=5, seed=1, max_tokens=3, ignore_eos=True),
    ]
    limits = {"max_model_len": 256, "max_num_batched_tokens": 128, "max_num_seqs": 8, "kv_cache": "4MiB"}
    with LLM(sys.argv[1], device="cuda", **limits, **options) as llm:
        ahead = found["ahead"]
        if ahead is not None:
            for prompts in ([[1, 2, 3]], [list(range(40)), [1, 2, 3], [5] * 20], [list(range(100))]):
                llm.generate(prompts, params[: len(prompts)])
            llm.generate([[1, 2, 3]] * 5, params[1])
    counts = None if ahead is None else {**vars(ahead.counts), "launchers": driver.active.launchers}
    print(json.dumps({"ahead": counts, "most": max(compiled.values(), default=0), "unforeseen": unforeseen}))


if __name__ == "__main__":
    main()
