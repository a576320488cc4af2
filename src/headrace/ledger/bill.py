"""The bill: where a request's time went, from its arrival to its last commit.

A request's life is cut at the commits of steps. Step k holds the time from max(its planning began, the commit before
it) to its own commit; what lies between two steps is a gap. Steps in flight overlap, these segments do not. Each
segment goes to items of the requests alive in it:

  queued     from arrival to the first step that holds the request's row
  prefill    its own share of steps that ran its prompt, or after a preemption all that was known of it
  decode     its own share of steps that ran what it generated
  waiting    on others: those steps' wall time less its own share
  held_back  steps that ran while it had a row but no span in them
  preempted  from losing its row to the first step that holds it again
  between    gaps while it had a row: the caller, detokenisation, an idle engine

Its own share of a step is what the cost model says the step would have taken with this span alone, at most the step's
wall time; all of it where no other request has a span in the step. Choices of one prompt are no others to each other.
Times are integer nanoseconds of the monotonic clock, so the items sum to the wall time exactly.

Cost: tallies are a table over the rows of the request table, so a step takes some array operations whatever the number
of requests; what all rows share (gaps, wall time) is one running sum each, noted when a row is entered. Plans take
effect here when they commit, hence in order, whatever the number of steps in flight.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from headrace.core.plan import StepPlan
from headrace.core.request import Request, TokenOutput

ITEMS = ("queued", "prefill", "decode", "waiting", "held_back", "preempted", "between")
_SHARE, _WALL, _STEPS, _PREFILL, _FIRST, _KNOWN, _END = range(7)  # columns of a row's tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """A request's bill; times in nanoseconds. `wall` is the sum of `ITEMS`."""

    request_id: str
    started_at: float  # arrival, seconds since the epoch
    finish_reason: str | None = None  # None: not ended yet, billed so far
    wall: int = 0
    queued: int = 0
    prefill: int = 0
    decode: int = 0
    waiting: int = 0
    held_back: int = 0
    preempted: int = 0
    between: int = 0
    first_token: int | None = None  # from arrival to the commit that brought it; None: none came
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: found in the prefix cache when first admitted
    recomputed_tokens: int = 0  # run again after preemptions
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0  # that held a span of it
    draft_tokens: int = 0  # verified; speculation
    accepted_draft_tokens: int = 0

    def items(self) -> dict[str, int]:
        """Nanoseconds by item."""
        return {name: getattr(self, name) for name in ITEMS}

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reverses it."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Bill:
        """A bill from `to_json`'s value. Fields this version does not know are ignored; ValueError when one that has
        no default is missing or a number is of the wrong kind."""
        known = {each.name: value[each.name] for each in fields(cls) if each.name in value}
        for name, item in known.items():
            if name in ("request_id", "finish_reason"):
                right = isinstance(item, str) or (item is None and name == "finish_reason")
            else:
                right = isinstance(item, (int, float)) or (item is None and name == "first_token")
            if not right or isinstance(item, bool):
                raise ValueError(f"not a bill: {name} is {item!r}")
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(f"not a bill: {error}") from None


def merge(bills: Sequence[Bill], request_id: str) -> Bill:
    """One bill for the choices of one prompt. Its times are those of the choice that ended last, which decided when
    the whole was done, counted from the first arrival; tokens and preemptions are summed, the prompt counts once. Of
    choices that ended together (within a millisecond: a beam's) it is the one with the most steps."""
    if len(bills) == 1:
        return replace(bills[0], request_id=request_id)
    last = max(bills, key=lambda bill: (round(bill.started_at + bill.wall / 1e9, 3), bill.steps))
    # all arrive within one call, so clocks of a microsecond are good enough to tell who was first
    extra = max(0, round((last.started_at - min(bill.started_at for bill in bills)) * 1e9))
    firsts = [bill.first_token for bill in bills if bill.first_token is not None]
    running = any(bill.finish_reason is None for bill in bills)
    return replace(
        last,
        request_id=request_id,
        started_at=min(bill.started_at for bill in bills),
        finish_reason=None if running else last.finish_reason,
        wall=last.wall + extra,
        queued=last.queued + extra,
        first_token=min(firsts, default=None),
        cached_tokens=bills[0].cached_tokens,
        recomputed_tokens=sum(bill.recomputed_tokens for bill in bills),
        output_tokens=sum(bill.output_tokens for bill in bills),
        preemptions=sum(bill.preemptions for bill in bills),
        draft_tokens=sum(bill.draft_tokens for bill in bills),
        accepted_draft_tokens=sum(bill.accepted_draft_tokens for bill in bills),
    )


@dataclass(slots=True)
class _Account:
    """A live request. `mark` is the time up to which its life outside the table has been billed."""

    request: Request
    started_at: float
    arrival: int
    mark: int
    row: int = -1
    stays: int = 0
    high: int = 0  # tokens that had been run, or found, before this stay
    found: int = 0  # tokens found when this stay began
    first_token: int | None = None
    steps: int = 0
    recomputed: int = 0
    items: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ITEMS, 0))

    def bill(self, finish_reason: str | None) -> Bill:
        request = self.request
        return Bill(
            request_id=request.id,
            started_at=self.started_at,
            finish_reason=finish_reason,
            wall=self.mark - self.arrival,
            **self.items,
            first_token=self.first_token,
            prompt_tokens=request.prompt_len,
            cached_tokens=request.num_cached,
            recomputed_tokens=self.recomputed,
            output_tokens=request.num_output,
            preemptions=request.num_preemptions,
            steps=self.steps,
            draft_tokens=request.drafts_verified,
            accepted_draft_tokens=request.drafts_accepted,
        )


def nanoseconds(seconds: float) -> int:
    """A time of the monotonic clock as the bills count it."""
    return round(seconds * 1e9)


def _members(request: Request) -> list[Request]:
    """What is queued and ends together."""
    return [request] if request.beam is None else request.beam.members


class BillKeeper:
    """Accounts of the requests alive. The caller keeps the bills that come out. One thread."""

    def __init__(self, num_rows: int):
        self._table = np.zeros((num_rows, 7), np.int64)
        self._accounts: dict[str, _Account] = {}
        self._epoch = time.time() - time.monotonic()  # taken once: steps of the clock move no bill against another
        self._occupants: list[_Account | None] = [None] * num_rows
        self._now = 0  # the last commit
        self._gaps = 0  # running sums over all steps
        self._walls = 0
        self._base: list[tuple[int, int]] = [(0, 0)] * num_rows  # the sums when the row was entered

    def __len__(self) -> int:
        """Requests alive."""
        return len(self._accounts)

    def add(self, request: Request) -> None:
        """A request was queued; with the leader of a beam search, all its members."""
        arrival = nanoseconds(request.arrival)
        started_at = self._epoch + request.arrival
        for member in _members(request):
            self._accounts[member.id] = _Account(member, started_at, arrival, arrival)

    def step(self, plan: StepPlan, num_runs: int, own: np.ndarray, began: float, ended: float) -> None:
        """A step of `num_runs` runs committed. `own` [S] is the predicted seconds of each span alone; times are
        monotonic seconds."""
        start, end = max(nanoseconds(began), self._now), nanoseconds(ended)
        end = max(start, end)
        self._gaps += start - self._now
        self._now = start
        for row in plan.released:
            self._leave(row)
        for admit in plan.admits:
            account = self._accounts.get(admit.request_id)
            if account is not None:  # else it ended while this step was in flight
                self._enter(account, admit.row, admit.num_computed, len(admit.token_ids))
        wall = end - start
        self._walls += wall
        self._now = end
        rows, starts, lengths, drafts = plan.spans
        share = wall if self._one_request(rows) else np.minimum(np.rint(own * 1e9), wall).astype(np.int64)
        tally = self._table[rows]
        tally[:, _SHARE] += share
        tally[:, _WALL] += wall
        tally[:, _STEPS] += num_runs
        tally[:, _END] = starts + (lengths - drafts) * num_runs  # drafts count when they have been accepted
        prefill = starts < tally[:, _KNOWN]
        if prefill.any():
            tally[:, _PREFILL] += share * prefill
            first = tally[:, _FIRST]  # a first token comes of a prompt's last span
            first[(first == 0) & prefill & plan.yields] = end
        self._table[rows] = tally

    def _one_request(self, rows: np.ndarray) -> bool:
        """Whether all rows are of one request, or of choices of one prompt: "r3/0" and "r3/1"."""
        if len(rows) < 2:
            return True
        first = None
        for row in rows:
            account = self._occupants[row]
            if account is None:
                return False
            name = account.request.id.rpartition("/")[0]
            if not name or name != (first := first or name):
                return False
        return True

    def end(self, outputs: Iterable[TokenOutput], now: float) -> list[Bill]:
        """Bills of the requests that ended with `outputs`. Those in the table end with the last commit, others `now`
        (monotonic seconds)."""
        bills = []
        for output in outputs:
            if output.finish_reason is None:
                continue
            account = self._accounts.get(output.request_id)
            for member in () if account is None else _members(account.request):
                account = self._accounts.pop(member.id)
                self._settle(account, now)
                bills.append(account.bill(str(output.finish_reason)))
        return bills

    def bill(self, request_id: str, now: float) -> Bill | None:
        """What a request that is alive owes so far; None if there is none."""
        account = self._accounts.get(request_id)
        if account is None:
            return None
        copy = replace(account, items=dict(account.items))
        self._settle(copy, now, keep=True)
        return copy.bill(None)

    def _settle(self, account: _Account, now: float, keep: bool = False) -> None:
        """Bill the account up to the last commit, or to `now` if it has no row."""
        if account.row >= 0:
            self._tally(account)
            if not keep:
                self._occupants[account.row] = None
        else:
            self._wait(account, max(nanoseconds(now), account.mark))

    @staticmethod
    def _wait(account: _Account, until: int) -> None:
        account.items["preempted" if account.stays else "queued"] += until - account.mark
        account.mark = until

    def _enter(self, account: _Account, row: int, num_computed: int, num_known: int) -> None:
        if account.row >= 0:  # an id used again before all steps of its first use had committed
            self._leave(account.row)
        self._wait(account, self._now)
        account.row, account.stays = row, account.stays + 1
        self._occupants[row] = account
        self._base[row] = self._gaps, self._walls
        self._table[row] = 0
        self._table[row, _KNOWN] = num_known
        self._table[row, _END] = num_computed
        self._table[row, _FIRST] = -1 if account.first_token is not None else 0
        account.found = num_computed
        if account.stays == 1:
            account.high = num_computed

    def _leave(self, row: int) -> None:
        account, self._occupants[row] = self._occupants[row], None
        if account is not None:
            self._tally(account)
            account.row = -1

    def _tally(self, account: _Account) -> None:
        """Move what its row has gathered to the account."""
        share, wall, steps, prefill, first, _, end = self._table[account.row].tolist()
        gaps, walls = self._base[account.row]
        items = account.items
        items["prefill"] += prefill
        items["decode"] += share - prefill
        items["waiting"] += wall - share
        items["held_back"] += self._walls - walls - wall
        items["between"] += self._gaps - gaps
        account.steps += steps
        account.recomputed += max(0, min(end, account.high) - account.found)  # nothing is run twice within a stay
        account.high = max(account.high, end)
        if first > 0:
            account.first_token = first - account.arrival
        account.mark = self._now
