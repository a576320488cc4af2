"""Pacing: chunks and admissions by predicted step time, and batch work that gives way. Nobody starves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeRunner, expected_output, make_request
from headrace.autopilot.slo import FLOOR, STRETCH, SloPacing
from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.loop import EngineCore
from headrace.core.plan_builder import SchedulerLimits
from headrace.core.queue import BATCH_PATIENCE
from headrace.core.request import FinishReason
from headrace.core.scheduler import Scheduler
from headrace.ledger.work import StepWork


class Linear:
    """Stands for the work model and the cost model: a step takes `base` + `each` a token, in seconds."""

    def __init__(self, base: float, each: float):
        self.base, self.each = base, each

    def work(self, spans, num_logits):
        return StepWork(num_tokens=int(spans[2].sum()))

    def predict(self, work):
        return self.base + self.each * work.num_tokens


def make_core(model, itl=None, ttft=None, seqs=4, budget=256, num_blocks=512, depth=1, clock=None):
    layout = KVLayout((KVGroup((0,), 1, 8, None),), 4, num_blocks, max_span=budget)
    pacing = SloPacing(model, model, itl=itl, ttft=ttft, **({"clock": clock} if clock else {}))
    scheduler = Scheduler(SchedulerLimits(seqs, budget, 1024), KVCacheManager(layout), pacing=pacing)
    runner = FakeRunner(4)
    return EngineCore(scheduler, runner, depth), runner


def finish(core, limit=5000):
    outputs = {}
    for _ in range(limit):
        if not core.has_work:
            break
        for out in core.step():
            outputs.setdefault(out.request_id, []).extend(out.token_ids)
    assert not core.has_work, "somebody starves"
    core.scheduler.check()
    return outputs


def chunks_beside_decodes(runner):
    """Prompt tokens of the steps that also decoded."""
    found = []
    for plan in runner.plans:
        lengths = plan.lengths.tolist()
        if 1 in lengths and max(lengths) > 1:
            found.append(sum(length for length in lengths if length > 1))
    return found


def test_chunks_keep_the_itl():
    core, runner = make_core(Linear(0.010, 0.001), itl=0.060)
    core.add(make_request("a", [1] * 5, 30))
    core.step()
    core.add(make_request("b", [2] * 300, 3))
    core.step()
    decision = core.scheduler.trace.decisions[0]
    assert decision[0] == "prompt tokens" and "60 ms" in decision[2]
    outputs = finish(core)
    chunks = chunks_beside_decodes(runner)
    assert all(40 <= chunk <= 49 for chunk in chunks[:-1]) and len(chunks) > 4  # 10 + 1 + 49 ms
    assert outputs["b"] == expected_output([2] * 300, 3)


def test_nothing_decodes_and_the_whole_budget_is_used():
    core, runner = make_core(Linear(0.010, 0.001), itl=0.060)
    core.add(make_request("a", [1] * 256, 2))
    finish(core)
    assert runner.plans[0].lengths.tolist() == [256]


def test_a_prompt_that_would_be_late_gets_more_within_a_bound():
    now = itertools.count(0, 0)
    core, runner = make_core(Linear(0.010, 0.001), itl=0.060, ttft=0.45, clock=lambda: float(next(now)))
    core.add(make_request("a", [1] * 5, 30, arrival=0.0))
    core.step()
    core.add(make_request("b", [2] * 200, 1, arrival=0.0))  # 60 ms steps would take 5 of them; 4 of 61 ms do it
    core.add(make_request("c", [3] * 250, 1, arrival=-10.0))  # late already
    finish(core)
    chunks = chunks_beside_decodes(runner)
    assert max(chunks) <= 1000 * (STRETCH * 0.060 - 0.010) and max(chunks) > 49


def test_admission_waits_for_the_itl_and_says_so():
    core, runner = make_core(Linear(0.010, 0.020), itl=0.055)  # two decodes take 50 ms, three 70
    for name in "abcd":
        core.add(make_request(name, [ord(name)] * 3, 6))
    core.step()
    core.step()
    assert len(core.scheduler.running) == 2 and "70.0 ms, above 55 ms" in core.scheduler.trace.refusals[0]
    outputs = finish(core)
    assert set(outputs) == set("abcd") and max(plan.num_spans for plan in runner.plans) == 2


@settings(max_examples=300, deadline=None)
@given(
    base=st.floats(0, 10),
    each=st.floats(0, 1),
    itl=st.one_of(st.none(), st.floats(1e-6, 1.0)),
    ttft=st.one_of(st.none(), st.floats(1e-6, 10.0)),
    depth=st.integers(1, 3),
    num_blocks=st.sampled_from([40, 512]),
    requests=st.lists(
        st.tuples(st.integers(1, 140), st.integers(1, 12), st.integers(0, 30), st.booleans()), min_size=1, max_size=8
    ),
)
def test_nobody_starves_and_tokens_do_not_change(base, each, itl, ttft, depth, num_blocks, requests):
    """Whatever is predicted and promised. A step that leaves a prompt unfinished runs at least half of FLOOR: the other
    half is kept for the prompts with the least left, and may find no taker."""
    core, runner = make_core(Linear(base, each), itl, ttft, budget=64, num_blocks=num_blocks, depth=depth)
    arrivals = sorted(enumerate(requests), key=lambda pair: pair[1][2])
    outputs = {}
    for step in range(6000):
        while arrivals and arrivals[0][1][2] <= step:
            index, (length, tokens, _, batch) = arrivals.pop(0)
            core.add(make_request(f"r{index}", [index + 1] * length, tokens, batch=batch))
        if not arrivals and not core.has_work:
            break
        for out in core.step():
            outputs.setdefault(out.request_id, []).extend(out.token_ids)
    assert not core.has_work, "somebody starves"
    core.scheduler.check()
    for index, (length, tokens, _, _) in enumerate(requests):
        assert outputs[f"r{index}"] == expected_output([index + 1] * length, tokens)
    if num_blocks == 512:  # or memory decides
        for plan in runner.plans:
            prompts = [length for length, yields in zip(plan.lengths, plan.yields, strict=True) if not yields]
            assert not prompts or plan.num_tokens >= FLOOR // 2


def test_batch_work_goes_after_those_that_somebody_waits_for():
    core, _ = make_core(Linear(0, 0), seqs=1)
    now = make_request("x", [1], 1).arrival
    core.add(make_request("batch", [1], 1, batch=True, arrival=now))
    core.add(make_request("person", [2], 1, arrival=now + 1))
    core.add(make_request("late person", [3], 1, arrival=now + BATCH_PATIENCE + 1))
    assert [request.id for request in core.scheduler.waiting.in_order()] == ["person", "batch", "late person"]


@pytest.mark.parametrize("depth", [1, 3])
def test_batch_work_gives_its_place_and_comes_back(depth):
    core, _ = make_core(Linear(0, 0), seqs=2, depth=depth)
    for name in ("b1", "b2"):
        core.add(make_request(name, [ord(name[1])] * 9, 40, batch=True))
    outputs = {}

    def steps(count):
        for _ in range(count):
            for out in core.step():
                outputs.setdefault(out.request_id, []).extend(out.token_ids)

    steps(6)
    core.add(make_request("person", [7] * 9, 12))
    steps(2 * depth)
    running = {request.id for request in core.scheduler.running}
    assert running == {"b1", "person"}  # the youngest gave way
    core.add(make_request("batch too", [8] * 9, 5, batch=True))
    steps(depth)
    assert {request.id for request in core.scheduler.running} == {"b1", "person"}  # equals never swap
    while core.has_work:
        steps(1)
    core.scheduler.check()
    assert outputs["b2"] == expected_output([ord("2")] * 9, 40) and len(outputs["person"]) == 12


def test_old_batch_work_keeps_its_place():
    core, _ = make_core(Linear(0, 0), seqs=1)
    core.add(make_request("batch", [1], 5, batch=True, arrival=0.0))
    core.step()
    core.add(make_request("person", [2], 1, arrival=BATCH_PATIENCE + 1))
    core.step()
    core.step()
    assert [request.id for request in core.scheduler.running] == ["batch"]
    finish(core)


def test_batch_work_gives_way_when_blocks_run_out():
    core, _ = make_core(Linear(0, 0), seqs=4, num_blocks=30)
    core.add(make_request("batch", [1] * 80, 20, batch=True))
    core.step()
    core.add(make_request("person", [2] * 40, 2))
    early = [out.request_id for _ in range(4) for out in core.step()]
    assert "person" in early
    outputs = finish(core)
    assert outputs["batch"][-1] == expected_output([1] * 80, 20)[-1]


def test_backlog_is_predicted():
    core, _ = make_core(Linear(0.0, 0.001), itl=0.1, ttft=1.0)
    assert core.scheduler.backlog() == 0.0
    core.add(make_request("a", [1] * 500, 1))
    core.step()
    assert core.scheduler.backlog() == pytest.approx((500 - 256) * 0.001, rel=0.05)
    assert finish(core)["a"] and core.scheduler.backlog() == 0.0
    core.add(make_request("b", [1] * 500, 1))
    assert core.abort(["b"])[0].finish_reason is FinishReason.ABORT
