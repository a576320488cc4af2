"""Beam search in the core: the sequences of a plain beam search, whatever else runs, and every block given back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import make_core

from fakes import expected_beams, expected_output, make_request
from headrace.core.beam import BeamGroup
from headrace.core.request import FinishReason, Request, RequestError
from headrace.sampling.params import SamplingParams


def make_beam(name, prompt, max_tokens, width, n=1, length_penalty=1.0, early_stopping=False, stop_ids=frozenset()):
    group = BeamGroup(width, n, length_penalty, early_stopping)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, beam_width=width, n=n)
    group.members = [
        Request(f"{name}/{i}", prompt, params, max_new_tokens=max_tokens, stop_ids=stop_ids, beam=group)
        for i in range(width)
    ]
    return group


def drive(core, arrivals, aborts=()):
    """Run to the end; (step, request) arrivals and (step, id) aborts."""
    outputs, step = {}, 0
    arrivals = sorted(arrivals, key=lambda pair: pair[0])
    while arrivals or core.has_work:
        while arrivals and arrivals[0][0] <= step:
            core.add(arrivals.pop(0)[1])
        news = core.abort([name for at, name in aborts if at == step]) + core.step()
        for out in news:
            tokens, _, _ = outputs.get(out.request_id, ([], None, None))
            outputs[out.request_id] = (tokens + out.token_ids, out.finish_reason, out.score)
        core.scheduler.check()
        step += 1
        assert step < 5000, "no progress"
    return outputs


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({3, 40}), frozenset(range(0, 97, 5))])
def test_beams_are_those_of_a_plain_search(early_stopping, length_penalty, stop_ids):
    core, _ = make_core(num_blocks=64, seqs=6)
    group = make_beam("b", list(range(9)), 12, 4, 4, length_penalty, early_stopping, stop_ids)
    outputs = drive(core, [(0, group.leader)])
    expected = expected_beams(list(range(9)), 12, 4, length_penalty, early_stopping, stop_ids)
    assert [outputs[f"b/{i}"][0] for i in range(4)] == [tokens for _, tokens in expected]
    assert [outputs[f"b/{i}"][2] for i in range(4)] == pytest.approx([score for score, _ in expected])
    for i in range(4):
        ended = outputs[f"b/{i}"][0][-1] in stop_ids
        assert outputs[f"b/{i}"][1] == (FinishReason.STOP if ended else FinishReason.LENGTH)


def test_a_beam_shares_its_prompt():
    core, runner = make_core(num_blocks=64, seqs=6, budget=32)
    drive(core, [(0, make_beam("b", list(range(24)), 3, 4).leader)])
    assert runner.num_run == 24 + 4 + 4


@pytest.mark.parametrize(("seqs", "blocks"), [(3, 64), (4, 12)])
def test_a_beam_that_never_fits_is_refused(seqs, blocks):
    core, _ = make_core(num_blocks=blocks, seqs=seqs)
    with pytest.raises(RequestError, match="a beam of 4"):
        core.add(make_beam("b", [1] * 8, 8, 4).leader)
    assert not core.has_work
    core.scheduler.check()


@settings(max_examples=500, deadline=None)
@given(
    beams=st.lists(
        st.tuples(
            st.integers(1, 20),  # prompt
            st.integers(1, 10),  # max_tokens
            st.integers(1, 4),  # width
            st.integers(0, 12),  # arrives at step
            st.none() | st.integers(0, 20),  # aborted at step
        ),
        min_size=1,
        max_size=4,
    ),
    plain=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 16), st.integers(0, 12)), max_size=5),
    block_size=st.sampled_from([1, 2, 4]),
    spare=st.integers(0, 20),
    seqs=st.integers(4, 7),
    depth=st.integers(1, 3),
    windows=st.sampled_from([(None,), (None, 5), (4,)]),
    caching=st.booleans(),
)
def test_beams_under_pressure_beside_other_requests(beams, plain, block_size, spare, seqs, depth, windows, caching):
    num_blocks = (4 * -(-40 // block_size) + spare) * len(windows)
    core, _ = make_core(num_blocks, block_size, seqs, seqs + 8, 40, depth, windows, "fcfs", caching)
    stop_ids = frozenset(range(0, 97, 9))
    arrivals, aborts = [], []
    for index, (length, max_tokens, width, arrival, aborted) in enumerate(beams):
        prompt = [(index * 7 + i) % 97 for i in range(length)]
        arrivals.append((arrival, make_beam(f"b{index}", prompt, max_tokens, width, width, stop_ids=stop_ids).leader))
        aborts += [(aborted, f"b{index}/0")] if aborted is not None else []
    for index, (length, max_tokens, arrival) in enumerate(plain):
        arrivals.append((arrival, make_request(f"p{index}", [50 + index] * length, max_tokens)))
    outputs = drive(core, arrivals, aborts)
    for index, (length, max_tokens, width, arrival, aborted) in enumerate(beams):
        prompt = [(index * 7 + i) % 97 for i in range(length)]
        found = [outputs[f"b{index}/{i}"] for i in range(width)]
        if aborted is not None and aborted >= arrival and found[0][1] == FinishReason.ABORT:
            assert all(each[1] == FinishReason.ABORT for each in found)
        else:
            expected = expected_beams(prompt, max_tokens, width, 1.0, False, stop_ids)
            assert [each[0] for each in found] == [tokens for _, tokens in expected]
    for index, (length, max_tokens, _) in enumerate(plain):
        assert outputs[f"p{index}"][0] == expected_output([50 + index] * length, max_tokens)


