"""VerifyCost: what steps with drafts take, in steps without: measured where it is known, thought cheap where it is not.

The cost model follows a step's time over all kinds of steps, and may be far off where it has not seen any, too dear as
often as too cheap. What is thought too dear is never tried and so never known. So a number of tokens that was not
measured yet is believed to take less than predicted, by a third at most and no less than the machine's rates allow or
the trend of fewer tokens that were measured says ("optimism in the face of uncertainty": Lai and Robbins 1985); once
tried it is known. What optimism may cost is bounded by the budget of losses.
"""

from __future__ import annotations

from bisect import bisect_left

_MEMORY = 0.9  # weight of the past against one more step
_KEPT, _BRIEFLY = 4000, 64  # steps with drafts after which what was not seen again is doubted; what was measured n
_LONGER = 4  # times after _BRIEFLY * _LONGER ^ (n - 1), since a single time may have been an accident
_FINE = 8  # numbers of tokens are told apart to 1 / this of themselves
_OPTIMISM = 1.5  # the cost model is thought to be wrong by so much at most
_STEEP = 0.9  # of the slope so far: tiles and noise make it no straight line
_FEW = 4  # measurements of which the least counts: what holds a step up makes it longer, never shorter
_SURE, _DEAR = 2, 1.25  # measurements without which a size is not believed to be dearer than so many times expected
_LATE = 2.0  # later a step counts as no longer than so many times what is known


class _Point:
    def __init__(self) -> None:
        self.ratio, self.count, self.seen = 0.0, 0, 0


class VerifyCost:
    """Points of one curve for each number of requests."""

    def __init__(self) -> None:
        self._points: dict[int, dict[int, _Point]] = {}  # requests, rounded -> tokens, rounded -> what they took
        self._now = 0

    def observe(self, num_rows: int, num_tokens: int, ratio: float) -> None:
        """Such a step took `ratio` times what it takes without drafts. The first one is only noted: kernels and
        recorded steps are made for its size."""
        self._now += 1
        points = self._points.setdefault(rounded(num_rows), {})
        point = points.get(rounded(num_tokens))
        if point is None:
            points[rounded(num_tokens)] = _Point()
            return
        stood = self._stands(point)
        point.count, point.seen = point.count + 1, self._now
        if point.count == 1:
            point.ratio = ratio
        elif point.count <= _FEW:
            point.ratio = min(point.ratio, ratio)
        else:
            weight = 1 - _MEMORY if stood else 0.5
            point.ratio += weight * (min(ratio, _LATE * point.ratio) - point.ratio)

    def known(self, num_rows: int, num_tokens: int) -> float:
        """What such steps took so far, in steps without drafts; 0 where none was measured."""
        point = self._points.get(rounded(num_rows), {}).get(rounded(num_tokens))
        return point.ratio if point is not None else 0.0

    def _stands(self, point: _Point) -> bool:
        return point.count > 0 and self._now - point.seen <= min(
            _KEPT, _BRIEFLY * _LONGER ** max(0, min(point.count, 9) - 1)
        )

    def ratio(self, num_rows: int, num_tokens: int, expected: float, least: float) -> float:
        """What such a step takes, in steps without drafts. `expected`: what the cost model says; `least`: what the
        machine's rates do."""
        points = self._points.get(rounded(num_rows))
        least = max(least, expected / _OPTIMISM)
        if points is None:
            return min(expected, max(1.0, least))
        key = rounded(num_tokens)
        known = sorted(each for each, point in points.items() if self._stands(point))
        place = bisect_left(known, key)
        if place < len(known) and known[place] == key:
            point = points[key]
            return max(point.ratio if point.count >= _SURE else min(point.ratio, _DEAR * expected), 1e-3)
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
