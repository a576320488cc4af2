"""The core against a fake worker: every request gets its own tokens, whatever the load, and nothing leaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeRunner, expected_output, make_request
from headrace.core.drafting import FixedDepth
from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.loop import EngineCore
from headrace.core.plan_builder import SchedulerLimits
from headrace.core.request import FinishReason, RequestError
from headrace.core.scheduler import Scheduler
from headrace.core.visits import OneRun


class Runs(OneRun):
    """Always so many runs of a step."""

    follows = True

    def __init__(self, count):
        self.count = count

    def runs(self, num_rows, serial=False):
        return self.count


def make_core(
    num_blocks=64,
    block_size=4,
    seqs=4,
    budget=16,
    max_len=128,
    depth=1,
    windows=(None,),
    policy="fcfs",
    caching=True,
    drafts=0,
    runs=1,
):
    groups = tuple(KVGroup((i,), 1, 8, window) for i, window in enumerate(windows))
    layout = KVLayout(groups, block_size, num_blocks, max_span=budget)
    limits = SchedulerLimits(seqs, budget, max_len, policy)
    drafting = FixedDepth(drafts) if drafts else None
    scheduler = Scheduler(limits, KVCacheManager(layout, caching), drafting, visits=Runs(runs))
    runner = FakeRunner(block_size, windows, drafts)
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
    assert sum(len(plan.admits) for plan in runner.plans) > 4, "memory pressure should have preempted"


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
        st.lists(st.integers(0, 96), min_size=1, max_size=24),  # prompt, after a shared beginning
        st.integers(0, 30),  # tokens of a common beginning
        st.integers(1, 24),  # max_tokens
        st.integers(0, 30),  # arrives at step
        st.none() | st.integers(0, 40),  # aborted at step
        st.integers(-1, 1),  # priority
        st.sampled_from([1, 1, 1, 3]),  # choices
        st.sampled_from([None, None, "salt"]),
    ),
    min_size=1,
    max_size=12,
)


def choices_of(index, prompt, max_tokens, priority, count, salt):
    """The core requests of one request with `count` choices."""
    made = []
    for choice in range(count):
        leader = made[0] if made else None
        made.append(
            make_request(
                f"{index}/{choice}", prompt, max_tokens, priority=priority, seed=choice, leader=leader, cache_salt=salt
            )
        )
    return made


@settings(max_examples=1500, deadline=None)
@given(
    requests=requests,
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 40),
    seqs=st.integers(1, 6),
    budget=st.integers(0, 30),
    windows=st.sampled_from([(None,), (None, None), (None, 5), (3, None, 11), (7,)]),
    depth=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    drafts=st.sampled_from([0, 0, 1, 3, 8]),
    runs=st.sampled_from([1, 2, 5, 8]),
)
def test_random_schedules_give_every_request_its_own_tokens(
    requests, block_size, spare_blocks, seqs, budget, windows, depth, policy, caching, drafts, runs
):
    max_len = 64
    common = list(range(50, 80))
    num_blocks = (-(-max_len // block_size) + spare_blocks // 4) * len(windows)
    core, _ = make_core(
        num_blocks, block_size, seqs, seqs + budget, max_len, depth, windows, policy, caching, drafts, runs
    )
    limit = min(max_len, core.scheduler.kv.layout.num_tokens)
    outputs: dict = {}
    pending = sorted(enumerate(requests), key=lambda item: item[1][3])
    step = 0
    while pending or core.has_work:
        while pending and pending[0][1][3] <= step:
            index, (prompt, shared, max_tokens, _, _, priority, count, salt) = pending.pop(0)
            for request in choices_of(index, common[:shared] + prompt, max_tokens, priority, count, salt):
                core.add(request)
        aborted = [f"{i}/{c}" for i, request in enumerate(requests) if request[4] == step for c in range(request[6])]
        for out in core.abort(aborted):
            outputs[out.request_id] = (outputs.get(out.request_id, ([], None))[0], out.finish_reason)
        for out in core.step():
            tokens, _ = outputs.get(out.request_id, ([], None))
            outputs[out.request_id] = (tokens + out.token_ids, out.finish_reason)
        core.scheduler.check()
        step += 1
        assert step < 5000, "no progress"
    for index, (prompt, shared, max_tokens, arrival, aborted, _, count, _) in enumerate(requests):
        prompt = common[:shared] + prompt
        for choice in range(count):
            tokens, reason = outputs[f"{index}/{choice}"]
            expected = expected_output(prompt, min(max_tokens, limit - len(prompt)), seed=choice)
            if aborted is not None and aborted >= arrival and reason == FinishReason.ABORT:
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, reason) == (expected, FinishReason.LENGTH)


# -- prefix cache


def run_one(core, request):
    core.add(request)
    tokens, _ = run(core)[request.id]
    return tokens


@pytest.mark.parametrize("windows", [(None,), (None, 6), (9,)])
@pytest.mark.parametrize("length", range(1, 14))
def test_a_prompt_that_is_wholly_known_computes_its_last_token(length, windows):
    # field case C02: never a hit of the whole prompt, same tokens
    core, _ = make_core(windows=windows)
    prompt = list(range(length))
    first = run_one(core, make_request("a", prompt, 3))
    again = make_request("b", prompt, 3)
    assert run_one(core, again) == first
    assert again.num_cached == (length - 1) // 4 * 4
    longer = make_request("c", [*prompt, 90, 91, 92, 93, 94], 3)
    run_one(core, longer)
    assert longer.num_cached == length // 4 * 4


def test_generated_text_is_found_in_the_next_turn_and_only_new_tokens_run():
    core, runner = make_core(num_blocks=64, max_len=128)
    prompt = list(range(21))
    answer = run_one(core, make_request("a", prompt, 20))
    runner.num_run = 0
    turn = make_request("b", prompt + answer + [80, 81, 82], 1)
    run_one(core, turn)
    assert turn.num_cached == 40 and runner.num_run == 44 - 40


def test_namespaces_do_not_meet():
    # field case C03; an empty salt is no salt
    prompt = list(range(12))
    core, _ = make_core()
    cached = []
    for number, (salt, adapter) in enumerate(
        [("A", None), ("A", None), ("B", None), (None, None), ("", None), (None, "A"), (None, "A"), ("A", "A")]
    ):
        request = make_request(str(number), prompt, 1, cache_salt=salt, adapter=adapter)
        run_one(core, request)
        cached.append(request.num_cached)
    assert cached == [0, 8, 0, 0, 8, 0, 8, 0]


def misses(core):
    """Step the core to its end, collecting what the prefix cache did."""
    found = []
    while core.has_work:
        core.step()
        found += core.scheduler.trace.prefixes
    return found


def test_every_miss_is_explained():
    core, _ = make_core(num_blocks=12, block_size=4, max_len=48)
    prompt = list(range(20))

    def miss(request):
        core.add(request)
        (use,) = misses(core)
        return use.miss

    assert "nothing is known" in miss(make_request("a", prompt, 1)).reason
    assert miss(make_request("b", prompt, 1)) is None
    changed = [*prompt[:10], 77, *prompt[11:]]
    found = miss(make_request("c", changed, 1))
    assert found.position == 10 and "at 10" in found.reason
    found = miss(make_request("d", prompt, 1, cache_salt="other"))
    assert found.position == 0 and "nothing is known in this namespace" in found.reason
    miss(make_request("e", list(range(40, 80)), 8))  # takes every block
    found = miss(make_request("f", prompt, 1))
    assert found.position == 0 and "evicted" in found.reason


def test_what_is_recomputed_after_a_preemption_is_no_hit():
    core, _ = make_core(num_blocks=8, block_size=4, seqs=4, budget=16, max_len=32)
    made = [make_request(str(i), [i] * 6, 14) for i in range(4)]
    for request in made:
        core.add(request)
    run(core)
    assert sum(request.num_preemptions for request in made) > 0
    assert all(request.num_cached == 0 for request in made)


def test_choices_share_the_prompt_and_copy_before_they_write():
    core, runner = make_core(num_blocks=64, budget=32, seqs=4)
    prompt = list(range(23))
    for request in choices_of("a", prompt, 9, 0, 4, None):
        core.add(request)
    outputs = run(core)
    for choice in range(4):
        assert outputs[f"a/{choice}"][0] == expected_output(prompt, 9, seed=choice)
    assert runner.num_run == 23 + 3 * 1 + 4 * 8, "followers run one token of the prompt"
    assert sum(len(plan.block_copies) for plan in runner.plans) == 3


def test_least_recently_used_goes_first():
    core, _ = make_core(num_blocks=8, block_size=4, seqs=1, max_len=32)
    run_one(core, make_request("old", [1] * 9, 1))
    run_one(core, make_request("new", [2] * 9, 1))
    run_one(core, make_request("old again", [1] * 9, 1))
    run_one(core, make_request("big", [3] * 15, 1))  # takes four blocks
    kept = make_request("x", [1] * 9, 1)
    run_one(core, kept)
    assert kept.num_cached == 8


def test_windows_give_blocks_back():
    core, _ = make_core(num_blocks=20, block_size=4, seqs=1, budget=8, max_len=400, windows=(10,))
    assert core.scheduler.kv.layout.num_tokens > 400
    tokens = run_one(core, make_request("a", list(range(90)), 200))
    assert tokens == expected_output(list(range(90)), 200)


# -- priorities (field case C06)


def test_a_prompt_waits_for_what_its_window_gives_back_once_its_own_steps_are_done():
    core, _ = make_core(num_blocks=5, budget=8, windows=(6,), seqs=1, depth=2)
    core.add(make_request("a", list(range(40)), 2))
    assert run(core, limit=50)["a"] == (expected_output(list(range(40)), 2), FinishReason.LENGTH)


def test_equal_priorities_never_displace_and_the_low_job_finishes_after_the_flood():
    core, _ = make_core(num_blocks=64, seqs=1, policy="priority")
    low = make_request("low", [1, 2, 3], 12, priority=5)
    core.add(low)
    outputs: dict = {}
    for step in range(200):
        core.add(make_request(f"high{step}", [step % 97], 1, priority=0))
        for out in core.step():
            tokens, _ = outputs.get(out.request_id, ([], None))
            outputs[out.request_id] = (tokens + out.token_ids, out.finish_reason)
    run(core, outputs)
    assert outputs["low"][0] == expected_output([1, 2, 3], 12)
    assert low.num_preemptions == 0 and len(outputs) == 201


def test_waiting_long_enough_beats_a_higher_class():
    core, _ = make_core(seqs=1, policy="priority")
    core.add(make_request("running", [9], 3))
    core.step()
    now = core.scheduler.running[0].arrival
    core.add(make_request("new high", [2], 1, priority=0, arrival=now + 100))
    core.add(make_request("old low", [1], 1, priority=3, arrival=now))
    core.add(make_request("new low", [3], 1, priority=3, arrival=now + 100))
    finished = []
    while core.has_work:
        finished += [out.request_id for out in core.step() if out.finish_reason]
    assert finished == ["running", "old low", "new high", "new low"]


# -- drafts


@pytest.mark.parametrize("drafts", [1, 4, 9])
def test_drafts_change_the_number_of_steps_and_nothing_else(drafts):
    prompt = list(range(10))
    core, runner = make_core(drafts=drafts, budget=32)
    assert run_one(core, make_request("a", prompt, 60)) == expected_output(prompt, 60)
    decodes = [plan for plan in runner.plans if plan.yields.any()]
    assert len(decodes) < 60 and max(int(plan.num_drafts.max()) for plan in decodes) == drafts
    turn = make_request("b", prompt + expected_output(prompt, 60), 1)
    assert run_one(core, turn) == expected_output(turn.prompt_token_ids, 1)
    assert turn.num_cached == 68, "accepted tokens are in the prefix cache, rejected ones are not"


def test_a_stop_token_inside_accepted_drafts_ends_the_request():
    prompt = [5, 6, 7]
    whole = expected_output(prompt, 40)
    core, _ = make_core(drafts=6, budget=32)
    core.add(make_request("a", prompt, 40, stop_ids=frozenset({whole[20]})))
    tokens, reason = run(core)["a"]
    assert tokens == whole[: whole.index(whole[20]) + 1] and reason == FinishReason.STOP


def test_nobody_is_preempted_for_a_guess():
    core, _ = make_core(num_blocks=12, block_size=4, seqs=2, max_len=24, drafts=8, budget=32)
    made = [make_request(str(i), [i] * 8, 16) for i in range(2)]
    for request in made:
        core.add(request)
    outputs = run(core)
    assert all(outputs[str(i)][0] == expected_output([i] * 8, 16) for i in range(2))
    assert all(request.num_preemptions == 0 for request in made)
