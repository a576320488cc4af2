"""AutoDepth in a simulated engine: never far behind the better of no drafts and the best fixed depth, at any load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import PARAMS, Machine, Simulation, compare

from headrace.autopilot.loss_budget import FIRST, SHARE, LossBudget
from headrace.autopilot.verify_cost import VerifyCost
from headrace.core.drafting import NoDrafts
from headrace.core.plan import StageTimes, StepPlan, StepResult
from headrace.core.request import Request


@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize(("crossing", "num_rows"), [(4.0, 1), (4.0, 8), (40.0, 1), (40.0, 8)])
def test_never_much_worse_than_none_or_the_best_fixed_depth(crossing: float, num_rows: int, network: bool) -> None:
    for acceptance in (0.2, 0.8):
        ratio, best = compare(Machine(crossing), acceptance, [num_rows], 3000, network=network, fixed=(1, 2, 4, 8))
        assert ratio >= 0.98, (acceptance, best)


@pytest.mark.slow
@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize("num_rows", [1, 8, 32, 256])
@pytest.mark.parametrize("crossing", [4.0, 40.0, 150.0])
def test_over_all_loads_and_acceptances(crossing: float, num_rows: int, network: bool) -> None:
    steps = 4000 if num_rows < 256 else 2000
    found = {
        acceptance: compare(Machine(crossing), acceptance, [num_rows], steps, network=network)
        for acceptance in (0.2, 0.4, 0.6, 0.8, 0.95)
    }
    # where nearly all drafts are right, so few steps are left that finding out how many pay is a part of them
    assert all(ratio >= (0.98 if acceptance < 0.95 else 0.97) for acceptance, (ratio, _) in found.items()), found


def test_no_collapse_when_load_crosses_thresholds() -> None:
    loads = [1, 32, 1, 64, 8, 1, 16, 4, 1]
    ratio, _ = compare(Machine(40.0), 0.7, loads, 300, fixed=(1, 2, 4, 8))
    assert ratio >= 0.98  # of one depth for all loads, or none
    simulation = Simulation(Machine(40.0), 0.7)
    policy, taken = simulation.auto(16), {}
    for num_rows in (1, 64, 1, 64, 1):
        simulation.load(num_rows)
        began = simulation.now
        simulation.run(policy, 3000 + 400 * num_rows)
        taken[num_rows] = (*taken.get(num_rows, ()), simulation.now - began)
    for seconds in taken.values():  # drafts are right by chance: so many tokens take 2 % more or less
        assert max(seconds[1:]) <= 1.05 * seconds[0], "what was known of a load stays known"


class Slow(Machine):
    """Steps without drafts take three times as long as they will."""

    def step(self, num_rows: int, num_tokens: int) -> float:
        return super().step(num_rows, num_tokens) * (3.0 if num_tokens == num_rows else 1.0)

    def one_pass(self, num_rows: int) -> float:
        return self.network * super().step(num_rows, num_rows)


@pytest.mark.parametrize(("crossing", "network", "acceptance"), [(40.0, 0.6, 0.5), (4.0, 0.06, 0.05)])
def test_what_steps_take_is_measured_again(crossing: float, network: float, acceptance: float) -> None:
    """A machine that was slow while it warmed up, against which drafts that do not pay seemed to."""
    simulation = Simulation(Slow(crossing, network=network), acceptance)
    policy = simulation.auto(16)
    simulation.load(1)
    for _ in range(12):
        simulation.step(policy)
    warm = simulation.machine = Machine(crossing, network=network)

    def gain(steps: int) -> float:
        began, tokens = simulation.now, simulation.tokens
        for _ in range(steps):
            simulation.step(policy)
        return (simulation.tokens - tokens) * warm.step(1, 1) * simulation.seconds_of / (simulation.now - began)

    assert gain(100) > 0.85 and gain(700) > 0.98


def test_steps_with_prompts_do_not_keep_drafts_waiting() -> None:
    """Where every step reads some prompt, none can be measured, and drafts go on."""
    simulation = Simulation(Machine(40.0), 0.8)
    policy = simulation.auto(16)
    simulation.load(2)
    while not policy.accounts.wants_plain(2):
        simulation.step(policy)
    spans = np.array([[0, 1, 2], [256, 256, 0], [1, 1, 50], [0, 0, 0]], np.int32)
    plan = StepPlan(0, spans=spans, yields=np.array([True, True, False]))
    result = StepResult(0, tokens=[[1], [1], []], num_accepted=[0, 0, 0], times=StageTimes(forward=0.02))
    policy.observe_step(plan, result)
    assert not policy.accounts.wants_plain(2)


def test_look_ups_that_find_nothing_cost_little() -> None:
    for look_up in (0.003, 0.03):
        ratio, best = compare(Machine(40.0, look_up=look_up), 0.5, [8], 2000, network=False, found=0.0, fixed=())
        assert best == "none" and ratio >= 0.985


def test_nothing_is_tried_where_not_even_perfect_drafts_pay() -> None:
    simulation = Simulation(Machine(4.0), 0.95)
    policy = simulation.auto(16)
    simulation.load(64)
    asked: list[int] = []
    limits = policy.limits

    def told(spans: Any, num_rows: int) -> Any:
        found = limits(spans, num_rows)
        asked.append(0 if found is None else int(found.any()))
        return found

    policy.limits = told  # type: ignore[method-assign]
    simulation.run(policy, 64 * 300)
    assert sum(asked) <= 10, "a few, since the machine may be faster than its rates"


def test_texts_that_change_are_followed() -> None:
    simulation = Simulation(Machine(40.0), 0.1)
    policy, plain = simulation.auto(16), Simulation(Machine(40.0), 0.1)
    simulation.load(4)
    plain.load(4)
    simulation.run(policy, 4 * 1000)
    plain.run(NoDrafts(), 4 * 1000)
    assert simulation.now <= plain.now / 0.98
    simulation.acceptance, began = 0.9, simulation.now
    simulation.run(policy, 4 * 3000)
    fast = simulation.now - began
    plain.run(NoDrafts(), 4 * 3000)
    assert fast < 0.6 * (plain.now - plain.now / 4), "drafts that were useless are tried again"


def test_a_budget_loses_its_share_at_most() -> None:
    budget, lost, steps = LossBudget(FIRST, 1.0, trials=True), 0.0, 0
    for _ in range(20_000):
        loss = 0.5 if budget.open else 0.0
        lost += loss
        steps += 1
        budget.settle(-loss, 1.0, num_drafts=4 if budget.open else 0)
    assert FIRST < lost <= FIRST + SHARE * steps + 1
    assert not LossBudget(FIRST, 1.0, trials=False).on_trial and LossBudget(FIRST, 1.0, trials=True).on_trial


def test_what_a_request_costs_once_is_paid_off() -> None:
    budget = LossBudget(FIRST, 1.0, trials=True)
    budget.invest(20.0)
    for _ in range(60):
        budget.settle(0.8, 1.0, num_drafts=4)
        assert budget.open, "what is gained makes up for it"
    poor = LossBudget(FIRST, 1.0, trials=True)
    poor.invest(20.0)
    for _ in range(60):
        poor.settle(0.0, 1.0, num_drafts=4)
    assert not poor.open and poor.balance < -10, "nothing is forgotten"


def test_costs_that_are_not_known_are_thought_low() -> None:
    cost = VerifyCost()
    assert cost.ratio(8, 16, expected=1.5, least=1.2) == 1.2
    assert cost.ratio(8, 16, expected=3.0, least=1.2) == 2.0, "the prediction is not thought to be quite wrong"
    assert cost.known(8, 16) == 0.0
    cost.observe(8, 16, 7.0)
    assert cost.ratio(8, 16, expected=1.5, least=1.2) == 1.2, "kernels are made for it"
    cost.observe(8, 16, 7.0)
    assert cost.ratio(8, 16, expected=2.0, least=1.2) == 2.5, "a single step may have been held up"
    cost.observe(8, 16, 1.5)
    assert cost.known(8, 16) == 1.5, "nothing makes a step shorter than it is"
    assert cost.ratio(8, 80, expected=4.0, least=9.0) == 4.0
    for _ in range(2):
        cost.observe(8, 40, 3.0)
    assert cost.ratio(8, 16, expected=9.0, least=9.0) == 1.5
    assert cost.ratio(8, 28, expected=9.0, least=9.0) == pytest.approx(2.25), "not above the line between two"
    assert cost.ratio(8, 28, expected=1.2, least=1.0) == 1.5, "nor below fewer tokens"
    assert cost.ratio(8, 80, expected=4.0, least=9.0) == 4.0


def test_a_decision_takes_microseconds() -> None:
    simulation = Simulation(Machine(40.0), 0.7, network=False)
    policy: Any = simulation.auto(16)
    simulation.load(32)
    simulation.run(policy, 32 * 300)
    requests = [Request(str(i), [1], PARAMS, max_new_tokens=9) for i in range(32)]
    calls, predict = 0, simulation.cost.predict

    def counted(work: Any) -> float:
        nonlocal calls
        calls += 1
        return predict(work)

    simulation.cost.predict = counted  # type: ignore[method-assign]
    for _ in range(50):
        for request in requests:
            policy.depth(request, 8, 32)
        policy.limits(requests, 32)
        policy.decisions()
    assert calls < 400, "predictions are made for kinds of request, not for each"
    assert np.isfinite(simulation.now)
