"""A progress bar for long offline work, shown on stderr by tqdm; nothing where tqdm is missing."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class ProgressBar:
    """Shows how much is done and how fast tokens come. This one shows nothing."""

    def show(self, done: int, total: int, num_tokens: int) -> None:
        """Items done so far, of how many, and tokens generated."""

    def close(self) -> None:
        """Leave the bar as it is. Calling it again does nothing."""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _TqdmBar(ProgressBar):
    def __init__(self, tqdm: Any, unit: str):
        self._tqdm, self._unit = tqdm, unit
        self._bar: Any = None
        self._started = time.perf_counter()

    def show(self, done: int, total: int, num_tokens: int) -> None:
        if self._bar is None:
            self._bar = self._tqdm(total=total, initial=0, unit=f" {self._unit}", dynamic_ncols=True)
        seconds = time.perf_counter() - self._started
        if num_tokens and seconds > 0:
            self._bar.set_postfix_str(f"{num_tokens / seconds:.1f} tokens/s", refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


def progress_bar(unit: str, *, show: bool = True) -> ProgressBar:
    """A bar that counts `unit`; one that shows nothing where `show` is False or tqdm is not installed."""
    if not show:
        return ProgressBar()
    try:
        from tqdm import tqdm
    except ImportError:
        return ProgressBar()
    return _TqdmBar(tqdm, unit)
