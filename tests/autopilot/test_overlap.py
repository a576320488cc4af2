"""RunAhead: drafts or overlapping steps, whichever was measured to bring more."""

import numpy as np
import pytest

from headrace.autopilot.overlap import RunAhead
from headrace.core.drafting import FixedDepth
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.sampling.params import Grammar, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Drafts(FixedDepth):
    """Of a network, and, where there are two, of a look-up before it."""

    def limits(self, requests, num_rows):
        return np.full((len(self._proposers), len(requests)), self._most, np.int32)


class Engine:
    """Steps of requests that all decode: with drafts a step brings `gain` tokens and takes `cost` times as long; by
    networks only, if that is something else, `network` times."""

    def __init__(self, gain, cost, network=None):
        self.gain, self.cost, self.network, self.now = gain, cost, network, 0.0
        names = ("eagle",) if network is None else ("ngram", "eagle")
        look_ups = () if network is None else (0,)
        self.policy = RunAhead(Drafts(4, names), clock=lambda: self.now, look_ups=look_ups)
        self.requests = [
            Request("a", [1], GREEDY, 10),
            Request("b", [1], GREEDY.with_(grammar=Grammar("regex", "a")), 10),
        ]
        for request in self.requests:
            request.runs_ahead = request.is_plain and not self.policy.speculates

    def step(self, length=1, warming=0.0, runs=1):
        assert self.policy.may_plan(self.requests, 0)
        asked = len(self.policy.limits(self.requests, 2).nonzero()[0]) // 2  # proposers
        assert bool(asked) == self.policy.speculates
        cost = 1.0 if not asked else self.network if asked == 1 and self.network else self.cost
        self.now += 0.01 * runs * cost + warming
        spans = np.array([[0, 1], [5, 5], [length, 1], [0, 0]], np.int32)
        tokens = [[1] * (self.gain if asked else 1) * runs] * 2
        result = StepResult(0, tokens, [0, 0], num_runs=runs, warming=warming > 0)
        self.policy.observe_step(StepPlan(0, spans=spans, yields=np.ones(2, bool)), result)
        return asked


@pytest.mark.parametrize(("gain", "cost", "better"), [(3, 1.5, True), (1, 1.3, False)])
def test_the_better_way_is_found_and_the_other_one_seldom_tried(gain, cost, better):
    engine = Engine(gain, cost)
    ways = [engine.step() for _ in range(3000)]
    assert ways[0], "drafts come first"
    assert len(set(ways[:80])) == 2, "both are measured"
    assert np.mean([way == better for way in ways[200:]]) > 0.85
    assert np.mean([way == better for way in ways[1500:]]) > 0.9


@pytest.mark.parametrize(("gain", "cost", "network", "better"), [(3, 1.5, 2.0, 2), (3, 4.0, 2.0, 1), (2, 3.0, 2.5, 0)])
def test_of_three_ways_the_best_is_found(gain, cost, network, better):
    engine = Engine(gain, cost, network)
    ways = [engine.step() for _ in range(6000)]
    assert ways[0] == 2 and len(set(ways[:120])) == 3, "all are measured, that of all proposers first"
    assert np.mean([way == better for way in ways[400:]]) > 0.8
    assert np.mean([way == better for way in ways[3000:]]) > 0.9
    told = engine.policy.decisions()
    assert [each[:2] for each in told] == ([("drafts", engine.policy._told(better))] if better < 2 else [])


def test_the_runs_of_a_visit_count_each():
    engine = Engine(3, 1.5)
    ways = [engine.step(runs=8) for _ in range(400)]
    assert len(set(ways[:12])) == 2 and np.mean(ways[100:]) > 0.85


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
    while not engine.policy._wanted:
        engine.step()
    assert not engine.policy.may_plan(engine.requests, 1) and plain.runs_ahead, "what is in flight comes first"
    assert engine.policy.may_plan(engine.requests, 0) and not plain.runs_ahead


def test_prompts_are_not_measured():
    engine = Engine(1, 1.3)
    for _ in range(300):
        assert engine.step(length=9), "no window of decode steps was ever full"
