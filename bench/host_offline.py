"""What a token costs the host where a GPU runs the steps: `LLM.generate` with a GPU that draws made-up tokens at once.

    .venv/bin/python bench/host_offline.py [--model FILE] [--requests 1024] [--prefix-caching] [--stop] [--json FILE]

All of the engine runs but the kernels: prompts, scheduler, request table, batches and patches for the GPU, results,
ledger, bills, text. The load is that of `headrace bench compare`'s offline case: 100 to 1,024 tokens in and out. Times
are this process's own on the processor; what the CUDA driver takes to send graphs and copies is not in them. Needs
torch and triton, of any kind.
"""

from __future__ import annotations

import argparse
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import headrace.frontend.engine as engine_module
import headrace.worker.device_runner as runner_module
from headrace.bench.results import Row, write_results
from headrace.core.plan import StepPlan
from headrace.device.cuda import GpuFacts
from headrace.frontend.llm import LLM
from headrace.ledger.machine import MachineFacts
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import Sampler
from headrace.worker.device_table import DeviceTable


class NoGpu:
    """A DeviceWorker without a model: every step has ended when it was sent."""

    attention_backend = "none"
    attention_refusals = ()

    def __init__(self, spec: Any, checkpoint: Any, config: Any, layout: Any, *rest: Any):
        self.model = SimpleNamespace(weight_bytes=2 * 10**8)
        layer = SimpleNamespace(num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
        model: Any = SimpleNamespace(attention_layers=[layer], spec=spec, taps=())
        cache: Any = SimpleNamespace(dtype=torch.bfloat16, layout=layout, copy_blocks=lambda copies: None)
        backend: Any = SimpleNamespace(alone_from=lambda layers, dtype: 1 << 30)
        rows, budget, device = config.max_num_seqs, config.max_num_batched_tokens, torch.device("cpu")
        table = DeviceTable(rows, config.max_model_len, len(layout.groups), layout.block_size, device)
        self.runner = runner_module.DeviceRunner(model, cache, table, backend, Sampler([]), budget, graphs=True)
        self.runner._drawn.copy_(torch.from_numpy(np.random.default_rng(0).integers(10, 30_000, (rows, 1))))

    def execute(self, plan: StepPlan) -> Any:
        return self.runner.execute(plan)

    def stop(self) -> None:
        pass


class Clock:
    """Seconds by part, each without the parts that it calls."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._inner: list[float] = []  # of each call under way: what the parts that it called took

    def watch(self, owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            started = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                took = time.thread_time() - started
                self.parts[part] = self.parts.get(part, 0.0) + took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        setattr(owner, name, timed)


def watch(clock: Clock, llm: LLM) -> None:
    engine, core, worker = llm.engine, llm.engine.core, llm.engine._worker
    runner: Any = worker.runner  # type: ignore[union-attr]
    for owner, name, part in (
        (engine, "submit", "prompts"),
        (core.scheduler, "schedule", "schedule: decodes, prompts, plan"),
        (core.scheduler, "_admit", "schedule: admit"),
        (core.scheduler, "commit", "commit"),
        (core._observer, "planned", "ledger: plan"),
        (core._observer, "committed", "ledger: commit"),
        (core._observer, "_end", "ledger: bills"),
        (runner._table, "apply", "send: table"),
        (runner._builder, "send", "send: batch"),
        (runner, "flush", "send: patches"),
        (runner, "execute", "send: the rest"),
        (runner_module.PendingStep, "result", "read the result"),
        (engine, "_take", "outputs and text"),
        (llm, "_finish", "loops"),
    ):
        clock.watch(owner, name, part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="of whose tokenizer texts are made; none: the default model")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--stop", action="store_true", help="with a stop string, which text is made for at once")
    parser.add_argument("--json", help="file of results to write")
    arguments = parser.parse_args()
    rates = MachineFacts("no GPU", 4.2e12, 7e14, 1, 0.0)
    engine_module.choose_gpu = lambda name: GpuFacts("no GPU", (9, 0), 139 << 30, 140 << 30, 132)
    engine_module.gpu_machine_facts = lambda name: rates
    engine_module.make_worker = NoGpu  # type: ignore[assignment]
    runner_module.patch = lambda *patches: None
    runner_module.DeviceRunner._step = lambda *step: None  # type: ignore[method-assign, assignment, return-value]
    draw = random.Random(0)
    sizes = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(arguments.requests)]
    prompts = [[draw.randrange(10, 30_000) for _ in range(count)] for count, _ in sizes]
    stop = ("\n\nQ:",) if arguments.stop else ()
    params = [SamplingParams(temperature=0.6, seed=1, max_tokens=n, ignore_eos=True, stop=stop) for _, n in sizes]
    with LLM(arguments.model, device="cuda", prefix_caching=arguments.prefix_caching, max_num_seqs=512) as llm:
        llm.generate([prompt[::-1] for prompt in prompts[:32]], params[:32])
        clock, steps = Clock(), llm.engine.ledger.totals.steps
        for watched in (False, True):  # watching takes time of its own: the sum is of a run without
            if watched:
                watch(clock, llm)
            started = time.process_time()
            outputs = llm.generate(prompts if watched else [prompt[1:] for prompt in prompts], params)
            if not watched:
                clock.parts["all"] = time.process_time() - started
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            taken, steps = llm.engine.ledger.totals.steps - steps, llm.engine.ledger.totals.steps
        rows = []
        for part, took in sorted(clock.parts.items(), key=lambda entry: -entry[1]):
            each = took / num_tokens * 1e6
            print(f"{part:36}{each:8.2f} us a token {took / taken * 1e6:8.0f} us a step")
            rows.append(Row(f"host, offline, {arguments.requests} requests: {part}", "us/token", "lower", each))
        if arguments.json:
            write_results(arguments.json, "host cost offline", rows, "torch", "triton")


if __name__ == "__main__":
    main()
