"""RunAhead: drafts or overlapping steps, whichever was measured to bring more."""

import numpy as np
import pytest

from headrace.autopilot.overlap import RunAhead
from headrace.core.drafting import FixedDepth
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.sampling.params import Grammar, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Engine:
    """Steps of requests that all decode: with drafts a step brings `gain` tokens and takes `cost` times as long."""

    def __init__(self, gain, cost):
        self.gain, self.cost, self.now = gain, cost, 0.0
        self.policy = RunAhead(FixedDepth(4), clock=lambda: self.now)
        self.requests = [
            Request("a", [1], GREEDY, 10),
            Request("b", [1], GREEDY.with_(grammar=Grammar("regex", "a")), 10),
        ]
        for request in self.requests:
            request.runs_ahead = request.is_plain and not self.policy.speculates

    def step(self, length=1, warming=0.0):
        assert self.policy.may_plan(self.requests, 0)
        drafts = self.policy.speculates
        self.now += 0.01 * (self.cost if drafts else 1.0) + warming
        spans = np.array([[0, 1], [5, 5], [length, 1], [0, 0]], np.int32)
        tokens = [[1] * (self.gain if drafts else 1)] * 2
        result = StepResult(0, tokens, [0, 0], warming=warming > 0)
        self.policy.observe_step(StepPlan(0, spans=spans, yields=np.ones(2, bool)), result)
        return drafts


@pytest.mark.parametrize(("gain", "cost", "better"), [(3, 1.5, True), (1, 1.3, False)])
def test_the_better_way_is_found_and_the_other_one_seldom_tried(gain, cost, better):
    engine = Engine(gain, cost)
    ways = [engine.step() for _ in range(3000)]
    assert ways[0], "drafts come first"
    assert len(set(ways[:80])) == 2, "both are measured"
    assert np.mean([way == better for way in ways[200:]]) > 0.85
    assert np.mean([way == better for way in ways[1500:]]) > 0.9


def test_steps_that_warm_up_say_nothing_of_those_to_come():
    engine = Engine(3, 1.5)
    ways = [engine.step(warming=2.0 if step % 9 == 5 and step < 40 else 0.0) for step in range(400)]
    assert np.mean(ways[100:]) > 0.85


def test_a_change_of_heart_is_followed():
    engine = Engine(1, 1.3)
    for _ in range(1500):
        engine.step()
    engine.gain = 4
    ways = [engine.step() for _ in range(1500)]
    assert np.mean(ways[800:]) > 0.8


def test_nothing_changes_while_steps_are_in_flight():
    engine = Engine(1, 1.3)
    while engine.step():
        plain, bound = engine.requests
        assert not plain.runs_ahead
        assert not engine.policy.may_plan(engine.requests, 1), "drafts continue what is in flight"
    plain, bound = engine.requests
    assert plain.runs_ahead and not bound.runs_ahead, "a grammar needs the host"
    assert engine.policy.may_plan(engine.requests, 1)
    assert engine.policy.depth(plain, 4, 2) == 0 and engine.policy.limits([plain], 1).shape == (0, 1)
    while engine.policy._wanted is False:
        engine.step()
    assert not engine.policy.may_plan(engine.requests, 1) and plain.runs_ahead, "what is in flight comes first"
    assert engine.policy.may_plan(engine.requests, 0) and not plain.runs_ahead


def test_prompts_are_not_measured():
    engine = Engine(1, 1.3)
    for _ in range(300):
        assert engine.step(length=9), "no window of decode steps was ever full"
