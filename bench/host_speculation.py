"""What speculation costs the host in a step, where a GPU runs the steps: the engine, with a GPU that answers at once.

    .venv/bin/python bench/host_speculation.py [--rows 1 8 64] [--only CASE ...] [--profile] [--json FILE]

Of engines that draft all runs but the kernels, as in bench/host_offline.py: policies, scheduler, tables, batches and
patches, what drafting networks are sent, results, ledger. The made-up GPU accepts each draft with a probability; its
own time is left out. Told are, a step: this process's microseconds on the processor; those beyond what a step without
drafts takes; those for which a GPU would stand still, from when the host had waited for all that it had sent to the
next launch; and calls of torch (copies, launches). What CUDA's driver takes for those is not in the times. Where a step
runs several times a visit of the host, each run counts. Needs torch and triton, of any kind.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headrace.frontend.engine as engine_module
import headrace.worker.device_networks as networks_module
import headrace.worker.device_runner as runner_module
from headrace.bench.results import Row, write_results
from headrace.core.plan import StepPlan
from headrace.core.visits import OneRun
from headrace.device.cuda import GpuFacts
from headrace.frontend.llm import LLM
from headrace.ledger.machine import MachineFacts
from headrace.loading.store import resolve_model
from headrace.models.blocks import CausalLM
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import Sampler
from headrace.spec.combined import CombinedProposer
from headrace.worker.device_chain import ChainRunner
from headrace.worker.device_speculation import Speculation
from headrace.worker.device_table import DeviceTable
from headrace.worker.drafting import combine

ACCEPTED = 0.7  # of drafts
WORDS = 30  # different tokens in texts: so few that look-ups nearly always find something
STEP = 0.7e-3  # seconds that a step says it took the GPU
ROUNDS = 9


class Gpu:
    """Draws and accepts at once; `seconds` is what that took on the processor, `idle` how long it stood still."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.seconds, self.idle = 0.0, 0.0
        self.launches, self.steps = 0, 0
        self.ended: float | None = None  # when the host learnt that nothing runs

    def launch(self) -> float:
        started = time.thread_time()
        self.launches += 1
        if self.ended is not None:
            self.idle += started - self.ended
            self.ended = None
        return started

    def step(self, runner: Any, batch: Any, warm: bool, cut: bool, *kernel: Any) -> None:
        started = self.launch()
        self.steps += type(runner) is runner_module.DeviceRunner
        drawn, count = runner._drawn.numpy(), int(batch.spans.num_rows[0])
        drawn[:count, 0] = self.random.integers(10, 10 + WORDS, count)
        if batch.lines.num_drafts is not None and type(runner) is runner_module.DeviceRunner:
            host, most = runner._table.host, drawn.shape[1] - 1
            rows, had = batch.spans.rows.numpy()[:count], batch.lines.num_drafts.numpy()[:count]
            columns, spans = np.arange(most), np.arange(count)
            drafts = host.token_ids[rows[:, None], host.num_tokens[rows][:, None] + columns]
            right = (self.random.random((count, most)) < ACCEPTED) & (columns < had[:, None])
            accepted = right.cumprod(axis=1).sum(axis=1)
            other = drawn[:count, 0].copy()
            drawn[:count, :most] = drafts
            drawn[:count][np.arange(most + 1) > accepted[:, None]] = -1
            drawn[spans, accepted] = other
        self.seconds += time.thread_time() - started

    def chain(self, runner: Any, key: Any) -> None:
        started = self.launch()
        drawn = runner._chain_drawn.numpy()
        drawn[:] = self.random.integers(10, 10 + WORDS, drawn.shape)
        self.seconds += time.thread_time() - started


class Mark:
    """An event of a GPU whose work is always done."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._launches = 0

    def record(self, *stream: Any) -> None:
        self._launches = self._gpu.launches

    def synchronize(self) -> None:
        if self._launches == self._gpu.launches:
            self._gpu.ended = time.thread_time()

    def elapsed_time(self, other: Mark) -> float:
        return 1e3 * STEP


class Model(CausalLM):
    """No model: what a runner asks of one."""

    def __init__(self, spec: Any):
        self.spec, self.taps = spec, ()
        self.inputs, self.vocab_size = None, spec.vocab_size

    @property
    def attention_layers(self) -> Any:
        spec = self.spec
        return [SimpleNamespace(num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)]

    @property
    def weight_bytes(self) -> int:
        return 2 * 10**8

    def carry(self, count: int, last: Any) -> None:
        pass

    def fuse(self, features: Any) -> Any:
        return features


BACKEND: Any = SimpleNamespace(alone_from=lambda layers, dtype: 1 << 30, reserve=lambda *sizes: None)


def no_cache(layout: Any, dtype: Any = torch.bfloat16, device: Any = None) -> Any:
    return SimpleNamespace(dtype=torch.bfloat16, layout=layout, copy_blocks=lambda copies: None)


class NoGpu:
    """A DeviceWorker without models."""

    attention_backend = "none"
    attention_refusals = ()
    gpu = Gpu()

    def __init__(self, spec: Any, checkpoint: Any, config: Any, layout: Any, backend: Any, grammars: Any, draft: Any):
        self.model, device, rows = Model(spec), torch.device("cpu"), config.max_num_seqs
        table = DeviceTable(rows, config.max_model_len, len(layout.groups), layout.block_size, device)

        def network() -> Any:
            networks = networks_module
            model: Any = Model(draft.spec)
            if draft.head is not None:
                model = networks.HeadModel(model, networks.CATCH_UP, device)
            passes = networks.Passes(
                model, draft.layout, BACKEND, config, torch.bfloat16, device, networks.CATCH_UP
            )
            mark(passes._runner, self.gpu)
            length, most = config.max_model_len, config.max_draft_tokens
            runner: Any = networks.DeviceDraftRunner(model, passes, draft.layout, length)
            if draft.head is not None:
                runner = networks.DeviceHeadRunner(model, passes, draft.layout, length)
            return networks.DeviceDraftProposer(runner, most, spec.vocab_size)

        self.proposer: CombinedProposer = combine(config, network)
        speculation = Speculation(table, self.proposer, config.max_draft_tokens) if config.proposers else None
        self.runner = runner_module.DeviceRunner(
            self.model, no_cache(layout), table, BACKEND, Sampler([]), config.max_num_batched_tokens, graphs=True,
            speculation=speculation, most_drafts=config.max_draft_tokens if config.proposers else 0,
        )  # fmt: skip
        mark(self.runner, self.gpu)

    def execute(self, plan: StepPlan) -> Any:
        return self.runner.execute(plan)

    def stop(self) -> None:
        pass


def mark(runner: Any, gpu: Gpu) -> None:
    """Give a runner the events that it has on a GPU."""
    for slot in runner._slots:
        slot.started, slot.finished = Mark(gpu), Mark(gpu)
    if isinstance(runner, ChainRunner):
        runner._begun, runner._landed = Mark(gpu), Mark(gpu)  # type: ignore[assignment]


class Calls(TorchDispatchMode):
    """Counts what is a launch or a copy on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram, 4 drafts": {"speculate": "ngram", "num_draft_tokens": 4},
    "suffix, 4 drafts": {"speculate": "suffix", "num_draft_tokens": 4},
    "ngram, by itself": {"speculate": "ngram"},
    "ngram, at rest": {"speculate": "ngram", "drafting": False},
    "eagle, 2 drafts": {"speculate": "eagle", "num_draft_tokens": 2},
    "eagle, 2 drafts, 8 runs": {"speculate": "eagle", "num_draft_tokens": 2, "runs": 8},
    "eagle, by itself": {"speculate": "eagle"},
    "eagle, at rest": {"speculate": "eagle", "drafting": False},
    "draft model, 4 drafts": {"speculate": "draft", "num_draft_tokens": 4},
    "draft model, 4 drafts, 4 runs": {"speculate": "draft", "num_draft_tokens": 4, "runs": 4},
}


class Runs(OneRun):
    """Always so many runs a visit."""

    follows = True

    def __init__(self, count: int):
        self._count = count

    def runs(self, num_rows: int, serial: bool = False) -> int:
        return self._count


def decide(policy: Any, drafting: bool) -> None:
    """Way of an engine that finds out for itself whether to draft."""
    if hasattr(policy, "_wanted"):
        policy._wanted, policy._learn = drafting, lambda rate: policy._begin()


def measure(gpu: Gpu, options: dict[str, Any], rows: int, profile: bool) -> tuple[float, float, float, float]:
    """(microseconds, those for which the GPU stands still, calls of torch, tokens) a step."""
    options = dict(options)
    drafting, runs = options.pop("drafting", True), options.pop("runs", 1)
    if options.get("speculate") == "draft":
        options["draft_model"] = str(resolve_model(None))
    steps = max(40, 150 // rows)
    with LLM(None, device="cuda", prefix_caching=False, max_num_seqs=max(64, rows), **options) as llm:
        engine = llm.engine
        scheduler = engine.core.scheduler
        scheduler.visits = Runs(runs)
        decide(scheduler.drafting, drafting)
        for _ in range(rows):
            prompt = gpu.random.integers(10, 10 + WORDS, 64).tolist()
            engine.submit(prompt, SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True), live=False)

        def run(count: int) -> None:
            for _ in range(count):
                engine.step()

        run(120)
        found, idle = [], []
        for _ in range(ROUNDS):
            started, aside, still, before = time.process_time(), gpu.seconds, gpu.idle, gpu.steps
            run(steps // runs)
            count = gpu.steps - before
            found.append((time.process_time() - started - (gpu.seconds - aside)) / count)
            idle.append((gpu.idle - still) / count)
        begun = gpu.steps
        before = sum(request.num_output for request in scheduler.running)
        with Calls() as calls:
            run(steps // runs)
        steps = gpu.steps - begun
        after = sum(request.num_output for request in scheduler.running)
        if profile:
            with cProfile.Profile() as profiler:
                run(2 * steps)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        engine.core.abort([request.id for request in list(scheduler.running)])
        took, still = (1e6 * statistics.median(each) for each in (found, idle))
        return took, still, calls.count / steps, (after - before) / steps


def replace_kernels(gpu: Gpu) -> None:
    rates = MachineFacts("no GPU", 4.2e12, 7e14, 1, 0.0)
    engine_module.choose_gpu = lambda name: GpuFacts("no GPU", (9, 0), 139 << 30, 140 << 30, 132)
    engine_module.gpu_machine_facts = lambda name: rates
    engine_module.make_worker = NoGpu  # type: ignore[assignment]
    networks_module.DeviceKVCache = no_cache  # type: ignore[assignment, misc]
    runner_module.patch = lambda *patches: None

    def step(runner: Any, *parts: Any) -> Any:
        return gpu.step(runner, *parts)

    def chain(runner: Any, key: Any) -> None:
        gpu.chain(runner, key)

    body: Callable[..., Any] = step
    runner_module.DeviceRunner._step = body  # type: ignore[method-assign]
    ChainRunner._step = body  # type: ignore[method-assign]
    ChainRunner._chain = chain  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="beside plain")
    parser.add_argument("--profile", action="store_true", help="print where the time of each case goes")
    parser.add_argument("--json", help="file of results to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gpu, results = NoGpu.gpu, []
    replace_kernels(gpu)
    print(f"{'':34}{'us a step':>12}{'added':>10}{'may add':>10}{'GPU still':>12}{'torch calls':>13}{'tokens':>9}")
    for rows in arguments.rows:
        plain = 0.0
        for name, options in CASES.items():
            if name != "plain" and name not in arguments.only:
                continue
            took, still, calls, tokens = measure(gpu, options, rows, arguments.profile and name in arguments.only)
            plain = took if name == "plain" else plain
            print(
                f"{name + f', {rows} rows':34}{took:12.0f}{took - plain:10.0f}{60 + 3 * rows:10}{still:12.0f}"
                f"{calls:13.1f}{tokens:9.1f}",
                flush=True,
            )
            results.append(Row(f"host, {name}, {rows} rows", "us/step", "lower", took, runs=ROUNDS))
            results.append(Row(f"GPU stands still, {name}, {rows} rows", "us/step", "lower", still, runs=ROUNDS))
    if arguments.json:
        write_results(arguments.json, "host cost of speculation", results, "torch", "triton")


if __name__ == "__main__":
    main()
