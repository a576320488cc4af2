"""The core against a fake worker: every request gets its own tokens, whatever the load, and nothing leaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeRunner, expected_output, make_request
from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.loop import EngineCore
from headrace.core.request import FinishReason, RequestError
from headrace.core.scheduler import Scheduler, SchedulerLimits


def make_core(num_blocks=64, block_size=4, seqs=4, budget=16, max_len=128, depth=1, groups=1, policy="fcfs"):
    layout = KVLayout(tuple(KVGroup((i,), 1, 8) for i in range(groups)), block_size, num_blocks)
    scheduler = Scheduler(SchedulerLimits(seqs, budget, max_len, policy), KVCacheManager(layout))
    runner = FakeRunner(block_size, groups)
    return EngineCore(scheduler, runner, depth), runner


def run(core, outputs=None, limit=10_000):
    outputs = {} if outputs is None else outputs
    for _ in range(limit):
        if not core.has_work:
            break
        for out in core.step():
            tokens, _ = outputs.setdefault(out.request_id, ([], None))
            outputs[out.request_id] = (tokens + out.token_ids, out.finish_reason)
    assert not core.has_work, "the core did not finish"
    core.scheduler.check()
    return outputs


def test_one_request_prefills_in_chunks_then_decodes():
    core, runner = make_core(budget=8)
    prompt = list(range(20))
    core.add(make_request("a", prompt, 5))
    outputs = run(core)
    assert outputs["a"] == (expected_output(prompt, 5), FinishReason.LENGTH)
    assert [plan.lengths.tolist() for plan in runner.plans] == [[8], [8], [4], [1], [1], [1], [1]]
    assert [plan.yields.tolist() for plan in runner.plans][:3] == [[False], [False], [True]]


def test_decodes_run_in_every_step_beside_a_long_prompt_and_a_short_one_overtakes():
    # field case C05: 2 decoding requests, then a prompt of 20 chunks, then one of 5 tokens
    core, _ = make_core(num_blocks=256, seqs=8, budget=16, max_len=512)
    core.add(make_request("d0", [1, 2], 60))
    core.add(make_request("d1", [3, 4], 60))
    core.step(), core.step()
    core.add(make_request("long", list(range(300)), 4))
    core.add(make_request("short", [5] * 5, 4))
    first: dict[str, int] = {}
    step = 0
    while "long" not in first:
        plan_outputs = {out.request_id for out in core.step()}
        assert {"d0", "d1"} <= plan_outputs, "a decode was stalled by a prompt"
        for name in plan_outputs:
            first.setdefault(name, step)
        step += 1
    assert first["short"] < first["long"]
    run(core)


def test_cold_prompts_all_run_soon():
    core, _ = make_core(num_blocks=256, seqs=4, budget=16, max_len=512)
    for i in range(4):
        core.add(make_request(str(i), [i] * 40, 40))
    for _ in range(-(-160 // 16) + 1):
        core.step()
    assert len(core.scheduler.running) == 4
    assert all(request.num_output for request in core.scheduler.running)


def test_preemption_recomputes_and_keeps_age():
    core, runner = make_core(num_blocks=8, block_size=4, seqs=4, budget=16, max_len=32)
    for i in range(4):
        core.add(make_request(str(i), [i] * 6, 14))
    outputs = run(core)
    for i in range(4):
        assert outputs[str(i)] == (expected_output([i] * 6, 14), FinishReason.LENGTH)
    assert sum(len(plan.released) for plan in runner.plans) > 4 - 1, "memory pressure should have preempted"


def test_stop_ids_end_a_request():
    prompt = [1, 2, 3]
    stop = frozenset(expected_output(prompt, 5)[3:4])
    core, _ = make_core()
    core.add(make_request("a", prompt, 50, stop_ids=stop))
    tokens, reason = run(core)["a"]
    assert reason == FinishReason.STOP
    assert tokens == expected_output(prompt, 50, stop)


@pytest.mark.parametrize(
    ("prompt_len", "fits"),
    [(127, True), (128, False), (500, False), (0, False)],
)
def test_requests_that_never_fit_are_refused_with_numbers(prompt_len, fits):
    core, _ = make_core(max_len=128)
    request = make_request("a", [1] * prompt_len, 1)
    if fits:
        core.add(request)
        assert len(run(core)["a"][0]) == 1
    else:
        with pytest.raises(RequestError, match=str(prompt_len) if prompt_len else "no tokens"):
            core.add(request)
        assert not core.has_work


def test_a_pool_smaller_than_the_limit_bounds_the_request():
    core, _ = make_core(num_blocks=8, block_size=4, max_len=128)
    with pytest.raises(RequestError, match="at most 32 fit"):
        core.add(make_request("a", [1] * 32, 1))
    core.add(make_request("b", [1] * 20, 100))
    tokens, reason = run(core)["b"]
    assert (len(tokens), reason) == (12, FinishReason.LENGTH)


def test_duplicate_ids_are_refused():
    core, _ = make_core()
    core.add(make_request("a", [1], 5))
    with pytest.raises(RequestError, match="in use"):
        core.add(make_request("a", [1], 5))


def test_abort_waiting_running_and_unknown():
    core, _ = make_core(seqs=1, budget=4)
    core.add(make_request("a", [1] * 30, 5))
    core.add(make_request("b", [2], 5))
    core.step()
    ended = core.abort(["b", "a", "nobody"])
    assert [(out.request_id, out.finish_reason) for out in ended] == [
        ("b", FinishReason.ABORT),
        ("a", FinishReason.ABORT),
    ]
    core.scheduler.check()
    assert not core.has_work


def test_priority_orders_the_waiting():
    core, _ = make_core(seqs=1, policy="priority")
    core.add(make_request("running", [9], 3))
    core.step()
    core.add(make_request("low", [1], 2, priority=5))
    core.add(make_request("high", [2], 2, priority=-1))
    core.add(make_request("mid", [3], 2))
    finished = []
    while core.has_work:
        finished += [out.request_id for out in core.step() if out.finish_reason]
    assert finished == ["running", "high", "mid", "low"]


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 96), min_size=1, max_size=40),  # prompt
        st.integers(1, 24),  # max_tokens
        st.integers(0, 30),  # arrives at step
        st.none() | st.integers(0, 40),  # aborted at step
        st.integers(-1, 1),  # priority
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=500, deadline=None)
@given(
    requests=requests,
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 40),
    seqs=st.integers(1, 6),
    budget=st.integers(0, 30),
    groups=st.integers(1, 2),
    depth=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_random_schedules_give_every_request_its_own_tokens(
    requests, block_size, spare_blocks, seqs, budget, groups, depth, policy
):
    max_len = 64
    num_blocks = (-(-max_len // block_size) + spare_blocks // 4) * groups
    core, _ = make_core(num_blocks, block_size, seqs, seqs + budget, max_len, depth, groups, policy)
    outputs: dict = {}
    pending = sorted(enumerate(requests), key=lambda item: item[1][2])
    step = 0
    while pending or core.has_work:
        while pending and pending[0][1][2] <= step:
            index, (prompt, max_tokens, _, _, priority) = pending.pop(0)
            core.add(make_request(str(index), prompt, max_tokens, priority=priority))
        for out in core.abort(str(i) for i, request in enumerate(requests) if request[3] == step):
            outputs[out.request_id] = (outputs.get(out.request_id, ([], None))[0], out.finish_reason)
        for out in core.step():
            tokens, _ = outputs.get(out.request_id, ([], None))
            outputs[out.request_id] = (tokens + out.token_ids, out.finish_reason)
        core.scheduler.check()
        step += 1
        assert step < 5000, "no progress"
    for index, (prompt, max_tokens, arrival, aborted, _) in enumerate(requests):
        tokens, reason = outputs[str(index)]
        expected = expected_output(prompt, max_tokens)
        if aborted is not None and aborted >= arrival and reason == FinishReason.ABORT:
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, reason) == (expected, FinishReason.LENGTH)
