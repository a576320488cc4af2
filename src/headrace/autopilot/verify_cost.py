"""VerifyCost: what steps with drafts take, in steps without: measured where it is known, thought cheap where it is not.

The cost model follows a step's time over all kinds of steps, and may be far off where it has not seen any, too dear as
often as too cheap. What is thought too dear is never tried and so never known. So a number of tokens that was not
measured yet is believed to take no longer than the machine's rates allow, and no less than the trend of fewer tokens
that were measured ("optimism in the face of uncertainty": Lai and Robbins 1985); once tried it is known. What optimism
may cost is bounded by the budget of losses.
"""

from __future__ import annotations

from bisect import bisect_left

_MEMORY = 0.9  # weight of the past against one more step
_KEPT, _BRIEFLY = 4000, 64  # steps with drafts after which what was not seen again is doubted; what was measured n
_LONGER = 4  # times after _BRIEFLY * _LONGER ^ (n - 1), since a single time may have been an accident
_FINE = 8  # numbers of tokens are told apart to 1 / this of themselves
_STEEP = 0.9  # of the slope so far: tiles and noise make it no straight line


class _Point:
    def __init__(self) -> None:
        self.ratio, self.count, self.seen = 0.0, 0, 0


class VerifyCost:
    """Points of one curve for each number of requests."""

    def __init__(self) -> None:
        self._points: dict[int, dict[int, _Point]] = {}  # requests, rounded -> tokens, rounded -> what they took
        self._now = 0

    def is_new(self, num_rows: int, num_tokens: int) -> bool:
        """Whether no step of so many requests and tokens, drafts among them, ran before. What the first one takes says
        little: kernels and recorded steps are made for its size."""
        return rounded(num_tokens) not in self._points.setdefault(rounded(num_rows), {})

    def observe(self, num_rows: int, num_tokens: int, ratio: float) -> None:
        """Such a step took `ratio` times what it takes without drafts. The first one is only noted."""
        self._now += 1
        points = self._points.setdefault(rounded(num_rows), {})
        point = points.get(rounded(num_tokens))
        if point is None:
            points[rounded(num_tokens)] = _Point()
            return
        weight = max(1 - _MEMORY, 1 / (point.count + 1))
        if not self._stands(point):
            weight = max(weight, 0.5)
        point.count, point.seen = point.count + 1, self._now
        point.ratio += weight * (ratio - point.ratio)

    def _stands(self, point: _Point) -> bool:
        return point.count > 0 and self._now - point.seen <= min(
            _KEPT, _BRIEFLY * _LONGER ** max(0, min(point.count, 9) - 1)
        )

    def ratio(self, num_rows: int, num_tokens: int, expected: float, least: float) -> float:
        """What such a step takes, in steps without drafts. `expected`: what the cost model says; `least`: what the
        machine's rates do."""
        points = self._points.get(rounded(num_rows))
        if points is None:
            return min(expected, max(1.0, least))
        key = rounded(num_tokens)
        known = sorted(each for each, point in points.items() if self._stands(point))
        place = bisect_left(known, key)
        if place < len(known) and known[place] == key:
            return max(points[key].ratio, 1e-3)
        left, below = (known[place - 1], points[known[place - 1]].ratio) if place else (num_rows, 1.0)
        if place > 1:  # the curve bends upwards: not below the line through two that are known
            first, start = known[place - 2], points[known[place - 2]].ratio
            slope = max(0.0, (below - start) / (left - first))
            least = max(least, below + _STEEP * slope * (key - left))
        if place < len(known):  # between two that are known: not above the line, since the curve bends upwards
            share = (key - left) / max(1, known[place] - left)
            least = min(least, below + share * (points[known[place]].ratio - below))
        return max(1.0, below, min(expected, least))


def rounded(count: int) -> int:
    """To about 1 / `_FINE` of itself."""
    unit = 1 << max(0, count.bit_length() - _FINE.bit_length())
    return (count + unit // 2) // unit * unit
