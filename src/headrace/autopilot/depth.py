"""AutoDepth: as many drafts as pay, by the proposer that pays most, or none.

With independent acceptance a, k drafts bring E = (1 - a^(k+1)) / (1 - a) tokens in expectation (Leviathan et al. 2023,
equation 1). With R decoding requests, n of which have drafts, a step brings R + n (E - 1) tokens and takes

    T(R + n k) + k c(n)     T: the cost model's prediction for so many tokens; c: a pass of the drafting network, if any

Of all depths k and proposers that with the most tokens per second for the whole step is taken, so what pays alone may
be refused when many requests share the step. Acceptance is estimated per request and proposer; a request's first
estimate is that of the requests before it.

Predictions and estimates may be wrong, and cost time to correct. So what drafts gain and cost is measured, step by
step, and each way to draft has a budget of losses (autopilot/loss_budget.py): with nothing left it is not asked. A
network is tried by one request first; where not even drafts that are all accepted could pay, nobody is asked at all.

A tree of drafts comes with a value for each node, the chance that it is accepted as its proposer sees it. There E is 1
plus the values' sum, times how much of such promises came true so far, and a number of nodes is chosen in place of k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.autopilot.accounts import DraftAccounts
from headrace.autopilot.verify_cost import rounded
from headrace.core.drafting import allows, expected_tokens
from headrace.core.plan import DraftPass, StepPlan, StepResult
from headrace.core.request import Request
from headrace.ledger.cost import CostModel
from headrace.ledger.work import StepWork, WorkModel

_PRIOR = 0.7  # acceptance assumed of the first drafts of all: optimism costs a few steps, pessimism would never try
_MEMORY = 0.96  # weight of the past against one more verified draft of a request
_NETWORK_MEMORY = 0.99  # the same for networks, which guess about alike everywhere
_LONG_MEMORY = 0.998  # the same of all requests together
_ALIKE = 0.12  # estimates of a request and of all that differ less are taken for the same
_ALIKE_NETWORK = 0.3  # of a network, which guesses about alike everywhere
_FORGET = 0.02  # per step without verification the estimate of a look-up moves this far back to the prior, so that it
# is tried again; divided by the requests that decode, so that trying costs a step the same at every load
_DOUBT = 8  # drafts that count as much as _PRIOR does
_MARGIN, _MARGIN_OFF = 1.005, 1.02  # drafts must promise this much; more, where the request has none now: hysteresis
_WORTH_TRYING = 1.02  # what drafts that are all accepted must bring
_THIN, _STAKE = 4.0, 0.25  # below so many steps of a look-up's budget a draft may lose this part of it, no more
_TRIAL = 4  # drafts of a trial that only better ones than assumed would make worth while
_CONTEXT = 256  # tokens of context assumed; the difference between depths hardly depends on it
_REFRESH = 32  # steps between looks at costs; while little is known, _EARLY
_EARLY, _EARLY_STEPS = 4, 256
_STEPS = 50  # acceptances are told apart by 1 / this
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_WORKS = 4096  # of steps that are kept
_SHARE_MEMORY = 0.8  # weight of the past in the share of requests that have drafts


class PassCost:
    """Seconds of a pass of the drafting network: measured, or for numbers of rows that were not seen yet the least that
    it can take, from its work, and no less than fewer rows took: a cost that is thought too high is never tried."""

    def __init__(self, cost: CostModel, work: WorkModel):
        self._facts = cost.facts
        self._work = work
        self._known: dict[int, tuple[float, int]] = {}  # rows, rounded -> seconds, measurements

    def seconds(self, num_rows: int) -> float:
        key = rounded(num_rows)
        if key in self._known:
            return self._known[key][0]
        spans = np.ones((4, num_rows), np.int32)
        spans[1] = _CONTEXT
        work = self._work.work(spans, num_rows)
        least = max(work.bytes_total / self._facts.read_bandwidth, work.flops_total / self._facts.flops)
        return max([least, *(seconds for rows, (seconds, _) in self._known.items() if rows < key)])

    def observe(self, each: DraftPass) -> None:
        """One pass was measured."""
        key = rounded(each.num_rows)
        known, count = self._known.get(key, (each.seconds, 0))
        weight = max(0.05, 1 / (count + 1))
        # a pause of the machine moves little
        self._known[key] = known + weight * (min(each.seconds, 4 * known) - known), count + 1


class _Best(NamedTuple):
    """The depth that pays most, and how much."""

    depth: int
    gain: float  # tokens per second, over those without drafts
    told: tuple[str, ...]  # the depths looked at, in words


class AutoDepth:
    """A `DraftPolicy` (core/drafting.py)."""

    speculates = True

    def __init__(
        self,
        cost: CostModel,
        work: WorkModel,
        most: int,
        proposers: Sequence[str] = ("ngram",),
        networks: Mapping[str, PassCost] | None = None,
    ):
        """`proposers` in the order in which a worker asks them; of them `networks` take time to draft."""
        self._cost = cost
        self._work = work
        self._most = most
        self._proposers = tuple(proposers)
        self._networks = dict(networks or {})
        named = tuple(enumerate(self._proposers))
        self._look_ups = tuple(source for source, name in named if name not in self._networks)
        self._network_sources = tuple(source for source, name in named if name in self._networks)
        self.accounts = DraftAccounts(cost, work, [name in self._networks for name in self._proposers])
        self.prior = dict.fromkeys(range(len(self._proposers)), _PRIOR)
        self._promise = dict.fromkeys(range(len(self._proposers)), 1.0)  # as Request.promise, of all requests together
        self._works: dict[tuple[int, int], StepWork] = {}  # (rows, drafts) -> what such a step does, which stays so
        self._seconds: dict[tuple[int, int], float] = {}  # (rows, drafts) -> predicted seconds
        self._best: dict[tuple[bool, int, float, int, int], _Best] = {}  # with a network's cost, most, acceptance, n, R
        self._passes: dict[int, float] = {}
        self._steps = 0
        self._tried = dict.fromkeys(range(len(self._proposers)), 0)  # drafts that were verified
        self._share = 0.5  # of the requests that decode: those with drafts to verify
        self._chosen: list[tuple[int, int]] = []  # (proposer, drafts) of each request of the step being planned
        self._last: _Best | None = None
        self._planned = False  # it was asked what to draft after the step that comes next
        self._left_alone = False  # nobody is asked after the step being planned: the budgets are used up

    def may_plan(self, requests: Iterable[Request], num_in_flight: int) -> bool:
        return not num_in_flight  # drafts continue what it brings

    # -- verifying what there is

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        if self.accounts.wants_plain(num_rows):
            return 0
        source = request.draft_source
        company = len(self._chosen) + 1
        budget = self.accounts.budget(source, num_rows)
        if budget.on_trial:  # they were made to be verified, whatever is thought of them
            depth = min(available, self._most)
        elif not budget.open and source in self._look_ups:  # it was used up meanwhile
            depth = 0
        else:
            if request.draft_values:
                best = self._last = self._of_tree(request, available, num_rows, company)
            else:
                acceptance = self._acceptance(request, source)
                best = self._choose(source, acceptance, num_rows, available, company, drafted=True)
            depth = best.depth if self._pays(request, best) else 0
            if depth > 1 and source in self._look_ups and budget.balance < _THIN:
                depth = self._within(depth, _STAKE * budget.balance, num_rows)
        if depth:
            self._chosen.append((source, depth))
        else:
            self._drift(request, source, num_rows)
        return depth

    def _within(self, depth: int, loss: float, num_rows: int) -> int:
        """The greatest depth up to `depth` that loses no more than `loss` steps if all is wrong; at least 1."""
        limit = (1.0 + loss) * self._predict(num_rows, 0)
        while depth > 1 and self._predict(num_rows, depth) > limit:
            depth = next(each for each in reversed(_DEPTHS) if each < depth)
        return depth

    def _pays(self, request: Request, best: _Best) -> bool:
        request.speculates = best.depth > 0 and best.gain > (_MARGIN if request.speculates else _MARGIN_OFF)
        return request.speculates

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        source = request.draft_source
        self.accounts.observe(source, num_drafts, num_accepted)
        acceptance, prior = request.acceptance.get(source, self.prior[source]), self.prior[source]
        memory = _NETWORK_MEMORY if source in self._network_sources else _MEMORY
        for trial in range(min(num_accepted + 1, num_drafts)):  # drafts behind the first wrong one were not tried
            acceptance += (1 - memory) * ((trial < num_accepted) - acceptance)
            prior += self._prior_weight(source) * ((trial < num_accepted) - prior)
        request.acceptance[source], self.prior[source] = acceptance, prior
        if promised := sum(request.draft_values[:num_drafts]):
            kept, own = min(num_accepted / promised, 4.0), request.promise.get(source, self._promise[source])
            request.promise[source] = own + (1 - _MEMORY) * (kept - own)
            self._promise[source] += (1 - _LONG_MEMORY) * (kept - self._promise[source])

    def _prior_weight(self, source: int) -> float:
        """Of one more draft in the estimate of all requests together."""
        self._tried[source] += 1
        return max(1 - _LONG_MEMORY, 1 / (_DOUBT + self._tried[source]))

    # -- what to draft next

    def limits(self, requests: Sequence[Request], num_rows: int) -> np.ndarray | None:
        self._planned = True
        if num_rows:
            share = min(1.0, len(self._chosen) / num_rows)
            self._share = _SHARE_MEMORY * self._share + (1 - _SHARE_MEMORY) * share
        rows = max(1, num_rows)
        asked: tuple[int, ...] = ()
        if self.accounts.ready:
            asked = tuple(source for source in range(len(self._proposers)) if self._may_ask(source, rows))
        self._left_alone = not asked
        if not asked:
            return np.zeros((0, len(requests)), np.int32)
        lone = len(self._proposers) == 1 and not self._networks
        if lone and all(request.params.draft_method is None for request in requests):
            return None  # what of a look-up is verified is decided then
        columns: list[list[int]] = []
        company = 1  # requests that will have drafts, this one included
        trying: set[int] = set()  # networks on trial that have a request already
        for request in requests:
            columns.append(self._limits_of(request, rows, company, asked, trying))
            company += any(columns[-1])
        return np.array(columns, np.int32).reshape(-1, len(self._proposers)).T

    def _may_ask(self, source: int, num_rows: int) -> bool:
        """Whether its budget allows it, and drafts that are all accepted would pay."""
        if not self.accounts.budget(source, num_rows).open:
            return False
        network, last = source in self._network_sources, self._last
        perfect = self._choose(source, 1.0, num_rows, self._most, 1, drafted=not network)
        self._last = last
        return perfect.gain > _WORTH_TRYING

    def _limits_of(
        self, request: Request, num_rows: int, company: int, asked: tuple[int, ...], trying: set[int]
    ) -> list[int]:
        """For the proposer that pays most; and behind a look-up, which may find nothing, for the network if it pays."""
        limits = [0] * len(self._proposers)
        acceptance, get = self.prior, request.acceptance.get
        own = asked
        if request.params.draft_method is not None:
            own = tuple(source for source in asked if allows(request, self._proposers[source]))
        look_ups = tuple(source for source in self._look_ups if source in own)
        networks = tuple(source for source in self._network_sources if source in own)
        # look-ups cost the same, nothing, so the one that is right most often pays most
        look_up = max(look_ups, key=lambda source: get(source, acceptance[source]), default=None)
        gain = 0.0
        if look_up is not None:
            limits[look_up] = self._most
            if networks:
                gain = self._best_of(look_up, request, num_rows, company).gain
        for source in networks:
            if self.accounts.budget(source, num_rows).on_trial:
                if source not in trying:
                    trying.add(source)
                    limits[source] = self._trial_depth(source, request, num_rows)
                    if look_up is not None:
                        limits[look_up] = 0
                continue
            best = self._best_of(source, request, num_rows, company)
            if best.depth and best.gain > (_MARGIN if request.speculates else _MARGIN_OFF):
                limits[source] = best.depth
                if look_up is not None and best.gain > gain:
                    limits[look_up] = 0
        for source in own:
            if not limits[source]:
                self._drift(request, source, num_rows)
        return limits

    def _trial_depth(self, source: int, request: Request, num_rows: int) -> int:
        acceptance = max(self._acceptance(request, source), _PRIOR)
        best = self._choose(source, acceptance, num_rows, self._most, 1, drafted=False)
        return best.depth if best.gain > _MARGIN_OFF else min(_TRIAL, self._most)

    def _best_of(self, source: int, request: Request, num_rows: int, company: int) -> _Best:
        acceptance = self._acceptance(request, source)
        return self._choose(source, acceptance, num_rows, self._most, company, drafted=False)

    def decisions(self) -> list[tuple[str, ...]]:
        chosen, self._chosen = self._chosen, []
        best, self._last = self._last, None
        if self._left_alone:
            return [("drafts", "none", "they could not pay here, or cost more than they brought and rest for a while")]
        if best is None:
            return []
        counts: dict[str, int] = {}
        for source, depth in chosen:
            counts[self._proposers[source]] = counts.get(self._proposers[source], 0) + depth
        text = ", ".join(f"{count} by {name}" for name, count in counts.items()) or "none"
        return [("drafts to verify", text, "tokens per second against a step without drafts", *best.told)]

    def observe_step(self, plan: StepPlan, result: StepResult) -> None:
        for network in self._networks.values():
            for each in result.draft_passes:
                network.observe(each)
        self.accounts.settle(plan, result, self._planned)
        self._planned = False
        self._steps += 1
        if self._steps % (_EARLY if self._steps < _EARLY_STEPS else _REFRESH) == 0:
            self._seconds.clear()
            self._best.clear()
            self._passes.clear()

    # -- accounts

    def _acceptance(self, request: Request, source: int) -> float:
        """Where a request seems no different from the others, what all have seen: of estimates of one quantity the
        greatest are those that chance has raised, and requests that draft less far than others save no pass."""
        prior = self.prior[source]
        own = request.acceptance.get(source, prior)
        alike = _ALIKE_NETWORK if source in self._network_sources else _ALIKE
        return prior if abs(own - prior) < alike else own

    def _drift(self, request: Request, source: int, num_rows: int) -> None:
        """Of a look-up; networks are tried when their budgets say so."""
        prior = self.prior[source]
        goal = prior if source in self._network_sources else max(_PRIOR, prior)
        acceptance, rate = request.acceptance.get(source, prior), _FORGET / num_rows
        request.acceptance[source] = acceptance + rate * (goal - acceptance)
        if source in request.promise:
            request.promise[source] += rate * (max(1.0, self._promise[source]) - request.promise[source])

    def _of_tree(self, request: Request, available: int, num_rows: int, company: int) -> _Best:
        """The number of nodes that pays most; the likeliest come first."""
        source = request.draft_source
        drafting = _rounded(max(company, self._share * num_rows))
        kept = request.promise.get(source, self._promise[source])
        plain = num_rows / self._predict(num_rows, 0)
        depth, gain, told = 0, 0.0, []
        for each in (*(step for step in _DEPTHS if step < available), available):
            brought = drafting * kept * sum(request.draft_values[:each])
            ratio = (num_rows + brought) / self._predict(num_rows, drafting * each) / plain
            told.append(f"{each}: {ratio:.2f}x")
            if ratio > gain:
                depth, gain = each, ratio
        return _Best(depth, gain, (f"nodes of a tree, {kept:.2f} of whose promise comes true", *told))

    def _choose(self, source: int, acceptance: float, num_rows: int, most: int, company: int, drafted: bool) -> _Best:
        """The best depth up to `most`, where as many requests have drafts as in the steps before, and at least the
        `company` that is known. Where the drafts exist already, their cost is no longer a matter of choice."""
        drafting = _rounded(max(company, self._share * num_rows))
        if source in self._network_sources:  # what it guesses right is about the same for all: all or none
            drafting = num_rows
        network = None if drafted else self._networks.get(self._proposers[source])
        rounded = round(acceptance * _STEPS) / _STEPS
        key = (network is not None, most, rounded, drafting, num_rows)
        found = self._best.get(key)
        if found is None:
            found = self._best[key] = self._search(rounded, num_rows, drafting, min(most, self._most), network)
        self._last = found
        return found

    def _search(self, acceptance: float, num_rows: int, drafting: int, most: int, network: PassCost | None) -> _Best:
        plain = num_rows / self._predict(num_rows, 0)
        depth, gain, told = 0, 0.0, []
        limit = num_rows + drafting * (expected_tokens(acceptance, most) - 1)  # tokens of a step, at the most
        for each in (*(step for step in _DEPTHS if step < most), most):
            seconds = self._predict(num_rows, drafting * each)
            if network is not None:
                seconds += each * self._pass_seconds(network, drafting)
            if limit / seconds < gain * plain:
                break  # nor do deeper ones pay, which take no less
            rate = (num_rows + drafting * (expected_tokens(acceptance, each) - 1)) / seconds
            told.append(f"{each}: {rate / plain:.2f}x")
            if rate / plain > gain:
                depth, gain = each, rate / plain
        return _Best(depth, gain, (f"at acceptance {acceptance:.2f}", *told))

    def _pass_seconds(self, network: PassCost, num_rows: int) -> float:
        if num_rows not in self._passes:
            self._passes[num_rows] = network.seconds(num_rows)
        return self._passes[num_rows]

    def _predict(self, num_rows: int, drafts: int) -> float:
        key = (num_rows, drafts)
        if key not in self._seconds:
            plain = self._work_of(num_rows, 0)
            if drafts:
                self._seconds[key] = self.accounts.seconds(num_rows, self._work_of(num_rows, drafts), plain)
            else:
                self._seconds[key] = self.accounts.plain_seconds(plain)
        return self._seconds[key]

    def _work_of(self, num_rows: int, drafts: int) -> StepWork:
        found = self._works.get((num_rows, drafts))
        if found is None:
            if len(self._works) >= _WORKS:
                self._works.clear()
            found = self._works[num_rows, drafts] = self._count_work(num_rows, drafts)
        return found

    def _count_work(self, num_rows: int, drafts: int) -> StepWork:
        spans = np.full((4, num_rows), 1, np.int32)
        spans[1] = _CONTEXT
        spans[2] += drafts // num_rows
        spans[2, 0] += drafts % num_rows
        return self._work.work(spans, num_rows + drafts)


def _rounded(number: float) -> int:
    """A count of at least 1, to about a quarter of itself: few different counts, few predictions."""
    count = max(1, round(number))
    if count <= 4:
        return count
    unit = 1 << (count.bit_length() - 3)
    return count // unit * unit
