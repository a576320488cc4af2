"""An engine whose clock and costs are made up, around the real policies, cost model and accounts of drafts.

Time is that of a machine on which a step takes the longer of reading all weights and of its tokens' arithmetic, not of
the curve that the cost model fits; drafts are right with a chosen probability. `python tests/autopilot/simulated.py`
prints how `auto` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.autopilot.depth import AutoDepth, PassCost
from headrace.core.drafting import DraftPolicy, FixedDepth, NoDrafts
from headrace.core.plan import DraftPass, StageTimes, StepPlan, StepResult
from headrace.core.request import Request
from headrace.ledger.cost import CostModel
from headrace.ledger.machine import MachineFacts
from headrace.ledger.work import WorkModel
from headrace.models.spec import ModelSpec
from headrace.sampling.params import SamplingParams

PARAMS = SamplingParams(temperature=0.0)
PROMPT = 100  # tokens
BYTES = 100_000_000  # of the model's weights


@dataclass(frozen=True)
class Machine:
    """Times are in decode steps of one request."""

    crossing: float = 40.0  # tokens whose arithmetic takes as long as reading the weights
    span: float = 0.002  # a request in a step
    network: float = 0.06  # a pass of the network for one request; more of them as a step of the model
    look_up: float = 0.003  # asking for one request
    reading: float = 0.0005  # what the network needs for a token of a prompt that it has not seen

    def step(self, num_rows: int, num_tokens: int) -> float:
        """A step of so many requests and tokens."""
        return 0.95 * max(1.0, num_tokens / self.crossing) + self.span * num_rows + 0.1 * num_tokens / self.crossing

    def one_pass(self, num_rows: int) -> float:
        """A pass of the network."""
        return self.network * self.step(num_rows, num_rows)


@dataclass
class Simulation:
    """Requests that decode without an end; each text agrees with drafts with one probability."""

    machine: Machine
    acceptance: float
    network: bool = True  # drafts come from a network, else from a look-up
    found: float = 1.0  # how often a look-up has something
    seed: int = 0
    now: float = 0.0
    tokens: int = 0
    seconds_of: float = 0.01  # a step of one request
    fed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        spec = ModelSpec("llama", 32_000, 576, 1536, 30, 9, 3, 64, 1e-5, 8192)
        unit = self.seconds_of
        bandwidth = 1.3 * BYTES / unit
        flops = 2.0 * BYTES * self.machine.crossing / unit
        self.cost = CostModel(MachineFacts("made up", bandwidth, flops, 1, 0.0))
        self.work = WorkModel(spec, BYTES, kv_bytes_per_token_layer=16.0)
        self.requests: list[Request] = []

    def auto(self, most: int) -> AutoDepth:
        """The policy under test."""
        name = "eagle" if self.network else "ngram"
        small = ModelSpec("llama", 32_000, 576, 1536, 1, 9, 3, 64, 1e-5, 8192)
        networks = {
            name: PassCost(
                self.cost, WorkModel(small, int(BYTES * self.machine.network), kv_bytes_per_token_layer=16.0)
            )
        }
        return AutoDepth(self.cost, self.work, most, (name,), networks if self.network else {})

    def load(self, num_rows: int) -> None:
        """So many requests from now on."""
        while len(self.requests) < num_rows:
            self.requests.append(Request(str(len(self.requests)), [1] * PROMPT, PARAMS, max_new_tokens=10**9))
        del self.requests[num_rows:]

    def run(self, policy: DraftPolicy, num_tokens: int) -> None:
        """Until the requests have so many tokens more."""
        end = self.tokens + num_tokens
        while self.tokens < end:
            self.step(policy)

    def step(self, policy: DraftPolicy) -> None:
        rows = len(self.requests)
        spans = np.ones((4, rows), np.int32)
        spans[0], spans[1], spans[3] = np.arange(rows), 256, 0
        for index, request in enumerate(self.requests):
            if request.num_drafts:
                spans[3, index] = policy.depth(request, request.num_drafts, rows)
                request.num_drafts = 0
        spans[2] += spans[3]
        limits = policy.limits(self.requests, rows)
        policy.decisions()
        plan = StepPlan(0, spans=spans, yields=np.ones(rows, bool), draft_limits=limits)
        accepted = np.minimum(self.rng.geometric(1 - self.acceptance, rows) - 1, spans[3])
        forward = self.machine.step(rows, int(spans[2].sum())) * self.seconds_of
        passes, drafting = self.draft(policy, limits)
        result = StepResult(
            0,
            tokens=[[1] * (1 + count) for count in accepted.tolist()],
            num_accepted=accepted.tolist(),
            draft_passes=tuple(passes),
            draft_seconds=(drafting,),
            times=StageTimes(forward=forward, draft=drafting),
        )
        for request, count, right in zip(self.requests, spans[3].tolist(), accepted.tolist(), strict=True):
            if count:
                policy.observe(request, count, right)
        policy.observe_step(plan, result)
        self.cost.observe(self.work.work(spans, int(spans[2].sum())), forward)
        self.tokens += rows + int(accepted.sum())
        self.now += forward + drafting

    def draft(self, policy: DraftPolicy, limits: np.ndarray | None) -> tuple[list[DraftPass], float]:
        """What is drafted for the next step: passes, and all seconds that it takes."""
        if not policy.speculates:
            return [], 0.0
        most = getattr(policy, "_most", 0)
        if limits is None:
            depths = np.full(len(self.requests), most)
        else:
            depths = limits[0] if len(limits) else np.zeros(len(self.requests), int)
        if not self.network:
            for request, depth in zip(self.requests, depths.tolist(), strict=True):
                request.num_drafts = depth if self.rng.random() < self.found else 0
            asked = len(self.requests) if depths.any() else 0
            return [], asked * self.machine.look_up * self.seconds_of
        behind = 0
        for request, depth in zip(self.requests, depths.tolist(), strict=True):
            request.num_drafts = depth
            if depth:
                behind += self.fed.get(request.id, PROMPT)
                self.fed[request.id] = 0
            else:
                self.fed[request.id] = min(self.fed.get(request.id, PROMPT) + 1, 256)
        passes = []
        for place in range(int(depths.max(initial=0))):
            count = int(np.count_nonzero(depths > place))
            passes.append(DraftPass(count, self.machine.one_pass(count) * self.seconds_of))
        read = max(0, behind - int(np.count_nonzero(depths))) * self.machine.reading * self.seconds_of
        return passes, sum(each.seconds for each in passes) + read


def compare(
    machine: Machine,
    acceptance: float,
    loads: Sequence[int],
    steps: int,
    most: int = 16,
    network: bool = True,
    found: float = 1.0,
    fixed: Sequence[int] = (1, 2, 4, 8, 16),
) -> tuple[float, str]:
    """(time of the better of no drafts and the best fixed depth / time of auto, which one that was); a load lasts until
    each request has `steps` tokens more."""

    def seconds(make: Callable[[Simulation], Any]) -> float:
        simulation = Simulation(machine, acceptance, network, found)
        policy = make(simulation)
        for num_rows in loads:
            simulation.load(num_rows)
            simulation.run(policy, num_rows * steps)
        return simulation.now

    others = {"none": seconds(lambda simulation: NoDrafts())}
    for depth in fixed:
        others[str(depth)] = seconds(lambda simulation, depth=depth: FixedDepth(depth))  # type: ignore[misc]
    best = min(others, key=others.__getitem__)
    return others[best] / seconds(lambda simulation: simulation.auto(most)), best


def main() -> None:
    for crossing in (3.0, 12.0, 40.0, 150.0):
        for network in (True, False):
            for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                told = []
                for acceptance in (0.2, 0.4, 0.6, 0.8, 0.95):
                    ratio, best = compare(Machine(crossing), acceptance, [num_rows], 2000, network=network)
                    told.append(f"{ratio:.3f} ({best})")
                print(
                    f"crossing {crossing:g} {'network' if network else 'look-up'} rows {num_rows}:", *told, flush=True
                )


if __name__ == "__main__":
    main()
