"""What a step costs the host: schedule, inputs and commit of a decode step, with a worker that answers at once.

    .venv/bin/python bench/host_cost.py [--json bench/results/cpu/host_cost.json]

Also the prefix match of a long prompt. No model runs; times are medians over many steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from headrace.bench.results import Row, write_results
from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.plan import StepResult
from headrace.core.plan_builder import SchedulerLimits
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import Sampled
from headrace.worker.batch import BatchBuilder, ShapeKey
from headrace.worker.table import RequestTable

STEPS = 400
TARGETS = {1: 100.0, 32: 200.0, 256: 500.0}  # microseconds


def decode_step(num_rows: int, queued: int = 0) -> float:
    """Median microseconds of one decode step's host work at `num_rows`, with `queued` requests waiting."""
    layout = KVLayout((KVGroup((0,), 1, 8),), 16, num_rows * 64)
    scheduler = Scheduler(SchedulerLimits(num_rows, max(256, num_rows), 1024), KVCacheManager(layout))
    table = RequestTable(num_rows, 1024, 1, 16)
    builder = BatchBuilder(table, 16)
    params = SamplingParams(max_tokens=900)
    for index in range(num_rows + queued):
        scheduler.add(Request(str(index), [index % 97] * 20, params, max_new_tokens=900))

    def step() -> float:
        started = time.perf_counter()
        plan = scheduler.schedule()
        table.apply(plan)
        builder.build(plan, ShapeKey("eager", plan.num_tokens, plan.num_spans))
        mid = time.perf_counter()
        counts = plan.yields.astype(np.int32)
        tokens = np.where(plan.yields, 7, -1).astype(np.int32)[:, None]
        result = StepResult(plan.step_id, [[7] if y else [] for y in plan.yields.tolist()], [0] * plan.num_spans)
        resumed = time.perf_counter()
        table.commit(plan, Sampled(tokens, counts, {}))
        scheduler.commit(plan, result)
        return (mid - started + time.perf_counter() - resumed) * 1e6

    while any(request.num_output < 2 for request in scheduler.running) or not scheduler.running:
        step()
    return statistics.median(step() for _ in range(STEPS))


def prefix_match(num_tokens: int) -> float:
    """Median milliseconds to match a prompt of `num_tokens`, all known, whose keys are not."""
    layout = KVLayout((KVGroup((0,), 1, 8),), 16, num_tokens // 8)
    manager = KVCacheManager(layout)
    prompt = np.random.default_rng(0).integers(0, 50_000, num_tokens).tolist()
    params = SamplingParams(max_tokens=1)
    first = Request("first", prompt, params, max_new_tokens=1)
    manager.allocate(first, num_tokens, [])
    first.num_computed = num_tokens
    manager.advance(first, -1)
    times = []
    for index in range(7):
        request = Request(str(index), prompt, params, max_new_tokens=1)
        started = time.perf_counter()
        hit = manager.match(request)
        times.append((time.perf_counter() - started) * 1e3)
        assert hit.num_tokens == (num_tokens - 1) // 16 * 16
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="bench/results/cpu/host_cost.json")
    arguments = parser.parse_args()
    rows = [
        Row(f"host cost of a step, {count} rows", "us", "lower", decode_step(count), target, "the goal", target=1.0)
        for count, target in TARGETS.items()
    ]
    rows.append(Row("host cost of a step, 1024 rows", "us", "lower", decode_step(1024)))
    rows.append(
        Row("host cost of a step, 32 rows, 10,000 queued", "us", "lower", decode_step(32, 10_000), 200.0, "the goal",
            target=1.0)
    )  # fmt: skip
    rows.append(Row("prefix match, 100,000 tokens", "ms", "lower", prefix_match(100_000), 10.0, "the goal", target=1.0))
    for row in rows:
        print(row.line())
    write_results(arguments.json, "host cost", rows)


if __name__ == "__main__":
    main()
