"""When the loop tells the observer of steps: where a device has nothing to do meanwhile, once the next one is sent."""

import pytest
from test_scheduler import make_core

from fakes import make_request
from headrace.core.loop import NullObserver


class Told(NullObserver):
    """What happened, in order."""

    def __init__(self):
        self.events = []

    def committed(self, plan, result, outputs, seconds):
        self.events.append(("told", plan.step_id))

    def aborted(self, outputs):
        self.events.append(("aborted", len(outputs)))


def watched(depth):
    core, runner = make_core(drafts=2, depth=depth)
    core._observer = told = Told()
    execute = runner.execute

    def noted(plan):
        told.events.append(("sent", plan.step_id))
        return execute(plan)

    runner.execute = noted
    core.add(make_request("a", [1, 2, 3], 12))
    return core, told.events


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_step_is_sent_before_the_last_one_is_told_of(depth):
    core, events = watched(depth)
    while core.has_work:
        core.step()
    steps = [step for what, step in events if what == "told"]
    assert steps == list(range(len(steps))) and len(steps) > 3, "all of them, in order, the last at once"
    if depth == 1:  # a worker that runs a step when it is executed
        assert events == [(what, step) for step in steps for what in ("sent", "told")]
        return
    assert events[:2] == [("sent", 0), ("told", 0)], "a prompt's step is told of to the moment"
    assert events[2:7] == [("sent", 1), ("sent", 2), ("told", 1), ("sent", 3), ("told", 2)]
    assert events[-1] == ("told", steps[-1])


def test_what_is_aborted_has_been_told_of_before():
    core, events = watched(2)
    for _ in range(3):
        core.step()
    assert events[-2:] == [("sent", 3), ("told", 2)], "the frontend looks at a step's tokens while the next one runs"
    core.abort(["a"])
    assert events[-1] == ("aborted", 1)
    assert core.step() == [] and not core.has_work and events[-1] == ("told", 3)
