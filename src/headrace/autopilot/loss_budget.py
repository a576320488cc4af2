"""LossBudget: how much time one way to draft may lose at one load, before it is left alone.

Whether drafts pay is found out by drafting, which costs time where they do not. So each way keeps an account in units
of a decode step without drafts: what its drafts gained is added, what they cost is taken off, and a small share of all
the time spent decoding is paid in, whether it drafts or not (a token bucket; as a bandit it is one that must never fall
far behind what is done by default: Wu et al. 2016, "Conservative bandits"). Whoever has nothing left waits until enough
has been paid in for another trial, after a failure twice as long. So over time at most that share is lost, whatever
predictions say, and however the measured times and acceptances change.

     open, on trial ----- enough drafts tried -----> open, trusted
        ^     |                                       |      |
        |     +---- nothing left ----> closed <-------+      |
        |                                |  <-- idle too long: by its estimates nothing pays
        +---- enough paid in ------------+
"""

from __future__ import annotations

SHARE, _SHARE_LOOK_UP = 0.004, 0.008  # of decode time: paid in
FIRST = 8.0  # steps that may be lost before anything is known
LATER = 1.5  # the same at other loads than the first
_MOST = 12.0  # of an account: what was earned long ago is no reason to lose it again
_LEAST, _LEAST_LOOK_UP = -24.0, -1.0  # a text that repeats itself may begin at any time
_TRIED = 24  # drafts after which estimates are worth more than a trial
_IDLE = 64  # steps without drafts after which nothing is expected any more
_TERM = 32  # steps over which what a request costs once is paid off


class LossBudget:
    """One account; times are in steps without drafts."""

    def __init__(self, balance: float, level: float, trials: bool):
        """`level`: what must have been paid in for another try, at first. `trials`: tries are made by few requests, and
        are repeated less and less often; else all go on as before (a look-up, whose cost is its asking)."""
        self.balance = balance
        self.open = True
        self._level = level
        self._trials = trials
        self._failures = 0
        self._tried = 0  # drafts since it opened
        self._idle = 0
        self._earned = 0.0  # since it opened
        self._debt = 0.0
        self._rate = 0.0

    @property
    def on_trial(self) -> bool:
        """Drafts are made to learn what they are worth, by one request at a time."""
        return self.open and self._trials and self._tried < _TRIED

    def invest(self, steps: float) -> None:
        """What was spent once, so that drafts are possible from now on: a prompt that the network had to read. It is
        paid off over the next steps, or at once where the drafts end."""
        self._debt += steps
        self._rate = max(self._rate, self._debt / _TERM)

    def settle(self, gained: float, passed: float, num_drafts: int, allowed: bool = True) -> None:
        """A step of `passed` time went by, in which `num_drafts` were verified, and `gained` that much (negative: lost
        it). `allowed`: there could have been drafts; else that there were none says nothing."""
        paid = min(self._debt, self._rate)
        self._debt -= paid
        if not self._debt:
            self._rate = 0.0
        gained -= paid
        self._earned += gained
        self._tried += num_drafts
        self._idle = 0 if num_drafts else self._idle + allowed
        share, least = (SHARE, _LEAST) if self._trials else (_SHARE_LOOK_UP, _LEAST_LOOK_UP)
        self.balance = max(least, min(self.balance + gained + share * passed, _MOST))
        if self.open:
            if self.balance <= 0:
                self._close()
            elif self._trials and self._idle > _IDLE:
                self.balance = 0.0
                self._close()
        elif self.balance >= min(self._level * 2.0**self._failures, _MOST):
            self.open, self._tried, self._idle, self._earned = True, 0, 0, 0.0

    def _close(self) -> None:
        self.open = False
        self._failures = self._failures + 1 if self._trials and self._earned <= 0 else 0
        self.balance = max(self.balance - self._debt, _LEAST if self._trials else _LEAST_LOOK_UP)
        self._debt = self._rate = 0.0
