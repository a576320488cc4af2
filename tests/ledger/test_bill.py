"""Bills sum to the wall time exactly, whatever the schedule; every item goes where the contract says."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ledger_cases import FACTS, spec

from fakes import FakeRunner, expected_output, make_request
from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.loop import EngineCore
from headrace.core.plan import StepPlan, StepResult
from headrace.core.plan_builder import SchedulerLimits
from headrace.core.request import Request, TokenOutput
from headrace.core.scheduler import Scheduler
from headrace.ledger.bill import ITEMS, Bill, merge
from headrace.ledger.book import Ledger
from headrace.ledger.cost import CostModel
from headrace.ledger.observer import LedgerObserver
from headrace.ledger.work import WorkModel

MODEL = WorkModel(spec(), weight_bytes=4_000_000)
MS = 1_000_000


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Fixed(CostModel):
    """Predicts 10 ms a token of a span, and learns nothing."""

    each = 10e-3

    def predict_each(self, model: Any, spans: np.ndarray, yields: np.ndarray, decodes: bool) -> np.ndarray:
        return spans[2] * self.each

    def observe(self, work: Any, seconds: float) -> None:
        pass


class SlowRunner(FakeRunner):
    """Each step takes a millisecond a token and some noise."""

    def __init__(self, block_size: int, clock: Clock, draw: random.Random):
        super().__init__(block_size)
        self._clock, self._draw = clock, draw

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self._clock.now += plan.num_tokens * 1e-3 + self._draw.random() * 1e-3
        return super().execute(plan)


class Watch(LedgerObserver):
    """Notes when each request ended by the contract: the last commit if it was in the table, else now."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.live: dict[str, Request] = {}
        self.ended: dict[str, float] = {}
        self.run: dict[str, int] = {}  # tokens run for each request
        self.rows: dict[int, str] = {}

    def added(self, request: Request) -> None:
        super().added(request)
        self.live[request.id] = request

    def planned(self, plan: StepPlan, scheduler: Scheduler, seconds: float) -> None:
        super().planned(plan, scheduler, 0.0)  # the scheduler's time is real, the clock is not

    def committed(self, plan: StepPlan, result: StepResult, outputs: list[TokenOutput], seconds: float) -> None:
        for admit in plan.admits:
            self.rows[admit.row] = admit.request_id
        for row, _, length, _ in plan.spans.T.tolist():
            self.run[self.rows[row]] = self.run.get(self.rows[row], 0) + length
        super().committed(plan, result, outputs, seconds)
        for output in outputs:
            if output.finish_reason is not None:
                self.ended[output.request_id] = self._clock()


def engine(
    *, rows: int = 4, budget: int = 16, blocks: int = 24, depth: int = 1, caching: bool = True, seed: int = 0,
    cost: type[CostModel] = CostModel, together: int = 1,
) -> tuple[EngineCore, Watch, Clock]:  # fmt: skip
    clock, draw = Clock(), random.Random(seed)
    layout = KVLayout((KVGroup((0,), 1, 4),), block_size=4, num_blocks=blocks)
    scheduler = Scheduler(SchedulerLimits(rows, budget, 64), KVCacheManager(layout, caching))
    watch = Watch(Ledger(FACTS), MODEL, cost(FACTS), rows, clock, together=together)
    return EngineCore(scheduler, SlowRunner(4, clock, draw), depth, watch), watch, clock


def request(name: str, prompt: list[int], count: int, clock: Clock) -> Request:
    return make_request(name, prompt, count, arrival=clock())


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


@pytest.mark.parametrize("seed", range(40))
def test_bills_sum_to_the_wall_time_under_random_schedules(seed: int) -> None:
    draw = random.Random(seed)
    core, watch, clock = engine(
        rows=draw.choice((1, 2, 4)), budget=draw.choice((4, 9, 16)), blocks=draw.choice((10, 14, 24)),
        depth=draw.choice((1, 2, 3)), caching=draw.random() < 0.5, seed=seed, together=1 + seed % 5,
    )  # fmt: skip
    prompts, alive, aborted = {}, [], {}
    for index in range(30):
        for _ in range(draw.randrange(3)):
            name = f"r{len(prompts)}"
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 14))]
            prompts[name] = prompt, draw.randrange(1, 16)
            core.add(request(name, prompt, prompts[name][1], clock))
            alive.append(name)
        clock.now += draw.random() * 0.01
        core.step()
        if alive and draw.random() < 0.15:
            name = draw.choice(alive)
            before = watch.bill(name)
            if core.abort([name]):
                aborted[name] = before, clock()
        if index % 7 == 0:
            for name in alive:  # a bill asked for on the way changes nothing
                watch.bill(name)
    finish(core)
    assert len(watch._bills) == 0
    for name, (prompt, count) in prompts.items():
        bill, request_ = watch.bill(name), watch.live[name]
        assert bill is not None
        arrival = round(request_.arrival * 1e9)
        assert sum(bill.items().values()) == bill.wall
        assert all(value >= 0 for value in bill.items().values()), bill
        if name in aborted:
            before, now = aborted[name]
            assert before is not None and bill.finish_reason == "abort"
            assert replace(before, finish_reason="abort") == bill
            assert bill.wall <= round(now * 1e9) - arrival
        else:
            assert bill.wall == round(watch.ended[name] * 1e9) - arrival
            assert bill.output_tokens == count == len(expected_output(prompt, count))
            # every token was run once, found, or run again; the last one needs no run
            run = len(prompt) + count - 1 - bill.cached_tokens + bill.recomputed_tokens
            assert watch.run[name] == run or core._depth > 1  # spans of a later step may run in vain
        assert (bill.prompt_tokens, bill.preemptions) == (len(prompt), request_.num_preemptions)
        assert bill.preemptions or bill.recomputed_tokens == bill.preempted == 0
        assert (bill.first_token is not None) == (bill.output_tokens > 0)


def test_steps_that_are_dealt_with_together_are_told_as_each_by_itself() -> None:
    told = []
    for together in (1, 6):
        core, watch, clock = engine(depth=2, together=together)
        for index in range(5):
            core.add(request(f"r{index}", [1, 2, 3 + index] * (2 + index), 9 + 4 * index, clock))
        seen = []  # what a reader sees after each step
        while core.has_work:
            core.step()
            seen.append((watch.ledger.totals.steps, len(watch.ledger.records())) if len(seen) % 3 == 0 else None)
        records = [
            replace(each, started_at=0.0, commit=0.0, total=round(each.total, 4), judgement=None)  # real times out
            for each in watch.ledger.records()
        ]
        told.append((seen, records, [replace(each, started_at=0.0) for each in watch.ledger.bills()]))
    for first, second in zip(*told, strict=True):
        assert [str(each) for each in first] == [str(each) for each in second]
    assert len(told[0][1]) > 20 and len(told[0][2]) == 5


def test_one_request_alone_pays_for_itself() -> None:
    core, watch, clock = engine(cost=Fixed)
    core.add(request("a", [1] * 8, 3, clock))
    clock.now += 0.5
    core.step()
    clock.now += 0.25
    finish(core)
    bill = watch.bill("a")
    assert bill is not None and bill.steps == 3 and bill.output_tokens == 3
    assert bill.queued == 500 * MS and bill.between == 250 * MS
    assert bill.waiting == bill.held_back == bill.preempted == 0  # its share is capped by the steps' wall time
    assert 8 * MS <= bill.prefill < 9 * MS and 2 * MS <= bill.decode < 4 * MS
    assert bill.first_token == bill.queued + bill.prefill


def test_a_request_alone_waits_on_nobody() -> None:
    class Cheap(Fixed):
        each = 1e-6  # a cost model that knows nothing yet

    core, watch, clock = engine(cost=Cheap, budget=64)
    core.add(request("a", [1] * 8, 4, clock))
    finish(core)
    for index in range(3):
        core.add(request(f"r/{index}", [index] * 8, 4, clock))
    finish(core)
    for name in ("a", "r/0", "r/1", "r/2"):
        bill = watch.bill(name)
        assert bill is not None and bill.waiting == 0 and bill.prefill > 8 * MS and bill.decode > 3 * MS
    for name in ("b", "s/0"):
        core.add(request(name, [1] * 8, 4, clock))
    finish(core)
    assert all(bill is not None and bill.waiting > 0 for bill in map(watch.bill, ("b", "s/0")))


def test_company_is_waited_for_and_no_span_is_held_back() -> None:
    class Cheap(Fixed):
        each = 1e-3

    core, watch, clock = engine(budget=8, cost=Cheap, caching=False)
    core.add(request("long", [1] * 24, 2, clock))
    core.add(request("short", [2] * 2, 2, clock))
    finish(core)
    long, short = watch.bill("long"), watch.bill("short")
    assert long is not None and short is not None
    assert 24 * MS <= long.prefill < 26 * MS and long.waiting > 0  # all of the steps that it had for itself
    assert short.prefill == 2 * MS and short.decode == 1 * MS
    assert short.waiting >= 6 * MS  # the long prompt's chunks run in the same steps


def test_preemption_is_billed_and_recomputed_tokens_are_counted() -> None:
    core, watch, clock = engine(rows=2, blocks=6, caching=False)
    core.add(request("old", [1] * 8, 12, clock))
    core.add(request("young", [2] * 8, 12, clock))
    finish(core)
    old, young = watch.bill("old"), watch.bill("young")
    assert old is not None and young is not None
    assert old.preempted == 0 < young.preempted and young.preemptions >= 1
    assert young.recomputed_tokens >= 8 and young.cached_tokens == 0
    assert watch.ledger.totals.preemptions == young.preemptions
    assert watch.ledger.totals.recomputed_tokens == young.recomputed_tokens
    assert watch.ledger.totals.requests == 2


def test_an_aborted_request_that_never_ran_was_queued() -> None:
    core, watch, clock = engine(rows=1)
    core.add(request("a", [1] * 4, 4, clock))
    core.add(request("b", [1] * 4, 4, clock))
    core.step()
    clock.now += 1.0
    core.abort(["b"])
    bill = watch.bill("b")
    assert bill is not None and bill.queued == bill.wall > 1000 * MS and bill.steps == 0
    assert bill.first_token is None and watch.bill("nobody") is None


def test_hits_are_counted_exactly() -> None:
    core, watch, clock = engine(blocks=24)
    prompt = list(range(20))
    for name in ("first", "second"):
        core.add(request(name, prompt, 2, clock))
        finish(core)
    second = watch.bill("second")
    assert second is not None and second.cached_tokens == 16  # whole blocks of 4, and one token must be run
    totals = watch.ledger.totals
    assert (totals.prompt_tokens, totals.cached_tokens, totals.hit_rate) == (40, 16, 0.4)
    uses = [use for record in watch.ledger.records() for use in record.prefixes]
    assert [(use.request_id, use.num_tokens, use.num_cached) for use in uses] == [("first", 20, 0), ("second", 20, 16)]


def test_each_span_is_predicted_as_a_step_of_its_own() -> None:
    rng = np.random.default_rng(0)
    for changes in ({}, {"windows": (None, 12, None, 5)}):
        model = WorkModel(spec(**changes), weight_bytes=4_000_000)
        cost = CostModel(FACTS, tile=4)
        spans = np.stack(
            [np.arange(50), rng.integers(0, 60, 50), rng.integers(1, 30, 50), np.zeros(50, np.int64)]
        ).astype(np.int32)  # fmt: skip
        yields = rng.random(50) < 0.6
        spans[3, :10], yields[:10] = spans[2, :10] - 1, True  # drafts
        each = cost.predict_each(model, spans, yields, decodes=False)
        for index in range(50):
            plan = StepPlan(0, spans=spans[:, index : index + 1], yields=yields[index : index + 1])
            assert each[index] == pytest.approx(cost.predict(model.of_plan(plan)), rel=1e-9)
        spans[2], spans[3], yields[:] = 1, 0, True
        quick = cost.predict_each(model, spans, yields, decodes=True)
        assert quick == pytest.approx(cost.predict_each(model, spans, yields, decodes=False), rel=1e-9)


def test_choices_merge_into_one_bill() -> None:
    first = Bill(request_id="r/0", started_at=100.0, finish_reason="stop", wall=50, queued=20, decode=30,
                 prompt_tokens=9, cached_tokens=4, output_tokens=3, steps=3, first_token=25)  # fmt: skip
    other = Bill(request_id="r/1", started_at=100.25, finish_reason="length", wall=90, queued=30, decode=60,
                 prompt_tokens=9, cached_tokens=8, output_tokens=6, steps=6, first_token=40, preemptions=1,
                 recomputed_tokens=5)  # fmt: skip
    whole = merge([first, other], "r")
    assert whole.request_id == "r" and whole.started_at == 100.0 and whole.finish_reason == "length"
    assert whole.wall == 90 + 250 * MS == sum(whole.items().values())
    assert (whole.prompt_tokens, whole.cached_tokens, whole.output_tokens) == (9, 4, 9)
    assert (whole.preemptions, whole.recomputed_tokens, whole.steps, whole.first_token) == (1, 5, 6, 25)
    assert merge([first], "r") == replace(first, request_id="r")
    assert merge([first, replace(other, finish_reason=None)], "r").finish_reason is None


def test_json_round_trip_and_refusals() -> None:
    bill = Bill(request_id="ä\n", started_at=1.5, finish_reason="stop", wall=7, queued=7)
    assert Bill.from_json({**bill.to_json(), "kind": "request", "new": 1}) == bill
    for wrong in ({"request_id": 3}, {"wall": "7"}, {"wall": None}, {"steps": True}, {"finish_reason": 1}):
        with pytest.raises(ValueError, match="not a bill"):
            Bill.from_json({**bill.to_json(), **wrong})
    with pytest.raises(ValueError, match="not a bill"):
        Bill.from_json({"request_id": "a"})
    assert set(ITEMS) <= set(bill.to_json())
