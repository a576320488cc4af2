"""On the path of a process, makes its wall clock step by up to a day, forwards and backwards, at every look."""

import itertools
import time

_real, _steps = time.time, itertools.count(1)


def _stepping() -> float:
    number = next(_steps)
    return _real() + ((number * 7919) % 172_801 - 86_400)


time.time = _stepping
