"""Several runs of a step: of decodes, and of verifications whose drafts are made between them."""

import pytest
from test_scheduler import make_core, run

from fakes import expected_output, make_request
from headrace.core.request import FinishReason


def test_a_step_of_decodes_runs_several_times_but_no_more_than_are_of_use():
    core, runner = make_core(runs=4, seqs=2)
    core.add(make_request("a", [1, 2, 3], 12))
    core.add(make_request("b", [4, 5], 7))
    outputs = run(core)
    assert outputs["a"] == (expected_output([1, 2, 3], 12), FinishReason.LENGTH)
    assert outputs["b"] == (expected_output([4, 5], 7), FinishReason.LENGTH)
    # the prompts with their first tokens, then 4 + 4 + 3 tokens of the longer one; the other ended within the second
    assert [(plan.num_spans, plan.num_runs) for plan in runner.plans] == [(2, 1), (2, 4), (2, 4), (1, 3)]


def test_what_ran_beyond_a_stop_is_neither_told_nor_cached():
    prompt = list(range(8))
    tokens = expected_output(prompt, 12)
    core, _ = make_core(runs=8)
    core.add(make_request("a", prompt, 12, stop_ids=frozenset({tokens[3]})))
    assert run(core)["a"] == (tokens[:4], FinishReason.STOP)
    known = core.scheduler.kv
    again = make_request("b", prompt + tokens, 3)
    assert known.match(again).num_tokens == 8  # 11 tokens were computed, in blocks of 4
    core.add(again)
    assert run(core)["b"] == (expected_output(prompt + tokens, 3), FinishReason.LENGTH)


def test_rows_that_the_host_draws_for_are_looked_at_after_every_run():
    core, runner = make_core(runs=4, seqs=2)
    core.add(make_request("a", [1, 2, 3], 6))
    request = make_request("b", [4, 5], 6)
    request.params = request.params.with_(presence_penalty=1.0)
    core.add(request)
    run(core)
    assert {plan.num_runs for plan in runner.plans} == {1}


@pytest.mark.parametrize("runs", [2, 4, 8])
def test_verifications_of_equally_many_drafts_run_several_times(runs):
    core, runner = make_core(runs=runs, seqs=2, drafts=3, num_blocks=99)
    requests = [make_request("a", [1, 2, 3], 60), make_request("b", [4, 5], 50)]
    for request in requests:
        core.add(request)
    outputs = run(core)
    assert outputs["a"] == (expected_output([1, 2, 3], 60), FinishReason.LENGTH)
    assert outputs["b"] == (expected_output([4, 5], 50), FinishReason.LENGTH)
    several = [plan for plan in runner.plans if plan.num_drafts.any() and plan.num_runs > 1]
    assert len(several) > 1 and max(plan.num_runs for plan in several) == runs
    # both begin with a token of the prompt's step; each verification brings one token more than were accepted
    for request in requests:
        verifications = request.drafts_verified / 3
        brought = request.drafts_accepted + verifications
        assert abs(brought - (request.num_output - 1)) <= 3, "but at the end, where fewer drafts are verified"


def test_of_verifications_beyond_a_stop_nothing_is_told():
    prompt = list(range(8))
    tokens = expected_output(prompt, 40)
    at = next(place for place in range(9, 40) if tokens[place] not in tokens[:place])
    core, runner = make_core(runs=8, drafts=2)
    core.add(request := make_request("a", prompt, 60, stop_ids=frozenset({tokens[at]})))
    assert run(core)["a"] == (tokens[: at + 1], FinishReason.STOP)
    assert any(plan.num_runs > 1 for plan in runner.plans)
    assert request.drafts_accepted + request.drafts_verified / 2 <= at + 3
    again = make_request("b", prompt + tokens, 3)
    assert core.scheduler.kv.match(again).num_tokens == (len(prompt) + at) // 4 * 4


def test_no_run_goes_beyond_the_longest_sequence_or_the_blocks_there_are():
    core, _ = make_core(runs=8, max_len=10)
    core.add(make_request("a", [1, 2, 3], 99))
    assert run(core)["a"] == (expected_output([1, 2, 3], 7), FinishReason.LENGTH)
    core, _ = make_core(num_blocks=5, seqs=2, runs=8, max_len=20)
    for name in ("a", "b"):
        core.add(make_request(name, [1, 2, 3], 16))
    outputs = run(core)
    assert outputs["a"] == outputs["b"] == (expected_output([1, 2, 3], 16), FinishReason.LENGTH)


