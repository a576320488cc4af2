"""DraftAccounts: what drafts gained and cost, measured step by step, and the budgets that this leaves.

A step of R decoding requests with drafts took some seconds; without them it would have taken what the cost model
predicts for its spans, in proportion to a step without drafts that was measured. The difference is what verifying
cost. A token beyond one a request is worth 1/R of such a step. What drafting cost is measured for each proposer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.autopilot.loss_budget import FIRST, LATER, LossBudget
from headrace.autopilot.verify_cost import VerifyCost
from headrace.core.plan import StepPlan, StepResult
from headrace.ledger.cost import CostModel
from headrace.ledger.work import StepWork, WorkModel

_LEVELS = (0.5, 1.0)  # steps paid in before look-ups, and networks, are tried again
_ADVANCE = 0.25  # of a step: what drafting costs beside passes and beyond this is spent once, not at each step
_MEMORY = 0.9  # weight of the past in what steps without drafts take
_ENOUGH = 4  # of them are measured before anything is drafted
_EVERY = 4  # later, every so many is
_RESTING = 8  # steps that nothing was drafted in, dealt with at once
_AGAIN, _SELDOM = 12, 400  # steps with drafts after which one without is made, to see what it takes now; twice as many
# each time, since engines, caches and clocks warm up
_CLEARLY = 0.85  # of what is thought: a step that took less is believed at once, for nothing makes a step shorter
_FASTER = 1.5  # kernels of fewer bits may be so much faster than the rate that was measured with float32
_PAUSE, _HELD_UP = 4.0, 1.5  # a step that takes so many times what steps without drafts do, or what is predicted or
# known of such with drafts, was held up by something else


class _Plain:
    """What steps without drafts take at one load."""

    def __init__(self) -> None:
        self.work = StepWork()  # of the last one that was measured
        self.seconds = 0.0  # that it took, smoothed
        self.measured = 0
        self.steps = 0
        self.since = 0  # steps with drafts since one without was measured
        self.patience = _AGAIN


class DraftAccounts:
    """A budget for the look-ups together, and for each network, at each load (a power of two of requests)."""

    def __init__(self, cost: CostModel, work: WorkModel, networks: Sequence[bool]):
        """`networks`: of each proposer, whether it runs one."""
        self._cost = cost
        self._work = work
        self._groups = tuple(1 + source if is_network else 0 for source, is_network in enumerate(networks))
        self._sources = dict(zip(self._groups, range(len(self._groups)), strict=True))  # group -> one of its proposers
        self._budgets: dict[tuple[int, int, int], LossBudget] = {}
        self._known: set[tuple[int, int]] = set()  # groups that have a budget anywhere, by the way of drafting
        self.way = 0  # of several ways to draft the one that is followed now: what drafts cost differs, so do budgets
        self._verified: dict[int, tuple[int, int]] = {}  # proposer -> drafts of this step, how many came true
        self._plain: dict[int, _Plain] = {}  # load -> steps without drafts
        self._latest = _Plain()  # of the load at which one was measured last
        self._verify = VerifyCost()
        # steps that nothing was drafted in and no budget knows of, how many requests decoded, whether they might draft
        self._rested = (0, 0, True)

    @property
    def ready(self) -> bool:
        """Steps without drafts are known, so that drafts can be held against them."""
        return self._latest.measured >= _ENOUGH

    def wants_plain(self, num_rows: int) -> bool:
        """The next step is to be one without drafts: what such a step takes at this load was measured long ago."""
        plain = self._plain.get(num_rows.bit_length())
        return plain is not None and plain.since >= plain.patience

    def budget(self, source: int, num_rows: int) -> LossBudget:
        """Of a proposer, where so many requests decode, as it is drafted now."""
        group, load = self._groups[source], num_rows.bit_length()
        key = group, load, self.way
        found = self._budgets.get(key)
        if found is None:
            start = LATER if (group, self.way) in self._known else FIRST
            found = self._budgets[key] = LossBudget(start, _LEVELS[bool(group)], trials=bool(group))
            self._known.add((group, self.way))
        return found

    def plain_seconds(self, work: StepWork) -> float:
        """Of a step without drafts."""
        predicted = self._cost.predict(work)
        if not self.ready:
            return predicted
        known = self._plain.get(work.num_logits.bit_length(), self._latest)
        known = known if known.measured >= _ENOUGH else self._latest
        return predicted * known.seconds / self._cost.predict(known.work)

    def _measured(self, num_rows: int) -> float | None:
        """What steps without drafts took at this load, if any were measured; sooner told than `plain_seconds`."""
        known = self._plain.get(num_rows.bit_length())
        return known.seconds if known is not None and known.measured >= _ENOUGH else None

    def seconds(self, num_rows: int, work: StepWork, plain: StepWork) -> float:
        """Of a step with drafts, whose work is `work` and would be `plain` without: see VerifyCost."""
        expected, without = self._cost.predict(work), self._cost.predict(plain)
        if not self.ready:
            return expected
        measured = self.plain_seconds(plain)
        least = self._roof(work) / max(measured, self._roof(plain))
        return measured * self._verify.ratio(num_rows, work.num_tokens, expected / without, least)

    def _roof(self, work: StepWork) -> float:
        facts = self._cost.facts
        return max(work.bytes_total / facts.read_bandwidth, work.flops_total / (_FASTER * facts.flops))

    def observe(self, source: int, num_drafts: int, num_accepted: int) -> None:
        """Drafts of one request were verified in the step that is being taken in."""
        drafts, accepted = self._verified.get(source, (0, 0))
        self._verified[source] = drafts + num_drafts, accepted + num_accepted

    def settle(self, plan: StepPlan, result: StepResult, allowed: bool = True) -> None:
        """The step is over. `allowed`: there might have been drafts."""
        verified, self._verified = self._verified, {}
        decodes = plan.num_decodes == plan.num_spans
        num_rows = plan.num_spans if decodes else int(np.count_nonzero(plan.yields))
        if not num_rows or result.warming:
            return
        seconds, drafting = (result.times.total - result.times.draft) / result.num_runs, self._drafting(result)
        self._compare(plan, num_rows, decodes, seconds)
        if not verified and not any(drafting):
            if self._rested[0] and self._rested[1:] != (num_rows, allowed):
                self._rest()
            self._rested = self._rested[0] + result.num_runs, num_rows, allowed
            if self._rested[0] >= _RESTING:
                self._rest()
            return
        self._rest()
        gained = dict.fromkeys(self._groups, 0.0)
        passed = 1.0
        if self.ready and any(count for count, _ in verified.values()):
            plain, passed = self._gains(plan, result.num_runs, num_rows, seconds, verified, gained)
        elif self.ready:
            plain = self._measured(num_rows) or self.plain_seconds(self._decode(plan))
        passes = sum(each.seconds for each in result.draft_passes)
        for source, spent in enumerate(drafting if self.ready else ()):
            group = self._groups[source]
            usual = min(spent, passes + _ADVANCE * plain) if group else min(spent, plain)
            gained[group] -= usual / plain
            if group and spent > usual:
                self.budget(source, num_rows).invest((spent - usual) / plain)
        for group, source in self._sources.items():
            count = sum(each for other, (each, _) in verified.items() if self._groups[other] == group)
            self.budget(source, num_rows).settle(gained[group], passed, count)

    def _gains(
        self,
        plan: StepPlan,
        num_runs: int,
        num_rows: int,
        seconds: float,
        verified: Mapping[int, tuple[int, int]],
        gained: dict[int, float],
    ) -> tuple[float, float]:
        """Add to `gained` by group what the step's drafts brought and verifying them cost, `seconds` in each of its
        runs; (seconds of a step without drafts, how many such steps this one counts for)."""
        drafted = sum(count for count, _ in verified.values())
        num_drafts = int(plan.num_drafts.sum())
        decode = self._decode(plan)
        plain = self.plain_seconds(decode)
        step = plain if plan.generates else self.plain_seconds(self._without(plan, num_rows))
        expected = self._cost.predict(self._work.work(plan.spans, num_rows + num_drafts))
        usual = plain / self._cost.predict(decode) * expected
        known = self._verify.known(num_rows, plan.num_tokens) * step
        measured = min(seconds, max(_PAUSE * step, _HELD_UP * usual))
        seconds = min(seconds, _HELD_UP * max(usual, known))
        for source, (count, accepted) in verified.items():
            cost = num_runs * (seconds - step) / plain
            gained[self._groups[source]] += accepted / num_rows - cost * count / drafted
        if plan.num_tokens != plan.num_spans + num_drafts:
            return plain, 1.0
        self._verify.observe(num_rows, plan.num_tokens, measured / step)
        return plain, num_runs * max(1.0, seconds / plain)

    def _rest(self) -> None:
        """Tell the budgets of the steps that nothing was drafted in."""
        (count, num_rows, allowed), self._rested = self._rested, (0, 0, True)
        if not count:
            return
        for source in self._sources.values():
            self.budget(source, num_rows)  # if there is none yet
        for (_, load, way), budget in self._budgets.items():  # ways that are not followed are paid too, or never tried
            for _ in range(count if load == num_rows.bit_length() else 0):
                budget.settle(0.0, 1.0, 0, allowed and way == self.way)

    def _drafting(self, result: StepResult) -> Sequence[float]:
        """Seconds that each proposer took."""
        if result.draft_seconds or not result.times.draft:
            return result.draft_seconds
        whose = bool(result.draft_passes)
        sources = [source for source, group in enumerate(self._groups) if bool(group) == whose] or [0]
        return [result.times.draft if source == sources[0] else 0.0 for source in range(len(self._groups))]

    def _compare(self, plan: StepPlan, num_rows: int, decodes: bool, seconds: float) -> None:
        """What a step without drafts took, all of whose spans are decodes; of others that it was not measured."""
        plain = self._plain.get(num_rows.bit_length())
        if plain is None:
            plain = self._plain[num_rows.bit_length()] = _Plain()
        if not decodes:
            # beside drafts there may be prompts: then another time, if one was to be measured
            plain.since = plain.since + 1 if plan.num_drafts.any() else 0
            return
        plain.steps += 1
        if plain.since >= plain.patience:
            plain.patience = min(2 * plain.patience, _SELDOM)
        elif plain.measured >= _ENOUGH and plain.steps % _EVERY:
            return
        plain.since = 0
        work = self._without(plan, plan.num_spans)
        if plain.measured:
            expected = plain.seconds * self._cost.predict(work) / self._cost.predict(plain.work)
            memory = min(_MEMORY, 1 - 1 / (1 + plain.measured)) if seconds > _CLEARLY * expected else 0.0
            seconds = memory * expected + (1 - memory) * min(seconds, _PAUSE * expected)
        plain.work, plain.seconds = work, seconds
        plain.measured += 1
        if plain.measured >= _ENOUGH or not self.ready:
            self._latest = plain

    def _without(self, plan: StepPlan, num_rows: int) -> StepWork:
        """The plan's spans without their drafts."""
        spans = plan.spans.copy()
        spans[2] -= spans[3]
        return self._work.work(spans, num_rows)

    def _decode(self, plan: StepPlan) -> StepWork:
        """A decode step of the plan's spans that yield."""
        spans = plan.spans.copy() if plan.generates else plan.spans[:, plan.yields]
        spans[1] += spans[2] - 1 - spans[3]
        spans[2], spans[3] = 1, 0
        return self._work.work(spans, spans.shape[1])
