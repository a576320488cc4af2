"""Ctrl-C waits while the engine's books are open: half a step, or half a submission, cannot be taken back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class HeldInterrupts:
    """For a `with` block: SIGINT is handled at its end, or where the block lets it through; a second one at once, by
    users who will not wait. Only the main thread is ever interrupted; in others this does nothing. It costs 10 us to
    enter and leave, so a loop enters once."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def let_through(self) -> None:
        """Nothing is half done: handle what has come."""
        came, self._came = self._came, None
        if came is not None and self._handler is not None:
            self._handler(*came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None and self._handler is not None:
            self._handler(number, frame)
        self._came = number, frame

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        self.let_through()
