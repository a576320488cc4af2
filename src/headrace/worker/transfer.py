"""Weights on their way to a GPU: read, dequantised and copied by several threads at once.

    file pages (mmap) --read_rows--> staging buffer, pinned --copy on a stream of the thread's own--> tensor on the GPU

A thread has two staging buffers: it fills one while the GPU takes the other, so reading, converting and copying
overlap, and the memory beside the files' pages is that of the buffers, however large the model. Tensors are cut into
parts of rows, which threads take in order; each part is written by one thread to its own place, so the result does not
depend on who was first. Conversions are torch's own on the CPU, to the nearest as on the GPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device.cpu import num_threads

STAGING_BYTES = 16 << 20  # of one buffer
MOST_THREADS = 8

Read = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class _Part:
    read: Read
    first: int  # row of its tensor
    target: torch.Tensor  # [N, K], contiguous


@dataclass(frozen=True)
class TransferReport:
    """What came over."""

    num_bytes: int  # as they lie on the GPU
    seconds: float
    num_threads: int

    def __str__(self) -> str:
        rate = self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0
        by = f"{self.num_threads} threads" if self.num_threads > 1 else "one thread"
        return f"{self.num_bytes / 1e9:.2f} GB in {self.seconds:.2f} s ({rate:.1f} GB/s) by {by}"


class WeightTransfer:
    """A `Transfer` (layers/weights.py) and a context: at its end everything is there, or the first error is raised."""

    def __init__(self, device: torch.device, threads: int | None = None, staging_bytes: int = STAGING_BYTES):
        """`device` without CUDA: the same way without pinned memory and streams."""
        if device.type == "cuda" and device.index is None:  # threads have to say which
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._staging_bytes = staging_bytes
        self._num_threads = threads or max(1, min(MOST_THREADS, num_threads()))
        self._parts: deque[_Part] = deque()
        self._changed = threading.Condition()
        self._complete = False  # no more parts will come
        self._error: BaseException | None = None
        self._num_bytes = 0
        self._started = 0.0
        self._threads: list[threading.Thread] = []
        self.report = TransferReport(0, 0.0, 0)

    def __enter__(self) -> WeightTransfer:
        self._started = time.perf_counter()
        self._torch_threads = torch.get_num_threads()
        for number in range(self._num_threads):
            thread = threading.Thread(target=self._work, name=f"headrace-load-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:  # what is still to come is of no use
            self._fail(error)
        with self._changed:
            self._complete = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        torch.set_num_threads(self._torch_threads)  # theirs was 1, which torch gives to threads that begin later
        self.report = TransferReport(self._num_bytes, time.perf_counter() - self._started, self._num_threads)
        if error is None and self._error is not None:
            raise self._error

    def add(self, read: Read, target: torch.Tensor) -> None:
        """See Transfer. Raises what went wrong meanwhile."""
        if self._error is not None:
            raise self._error
        parts = _parts(read, target, self._staging_bytes)
        with self._changed:
            self._parts.extend(parts)
            self._num_bytes += target.nbytes
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._parts.clear()
            self._changed.notify_all()

    def _next(self) -> _Part | None:
        with self._changed:
            while not self._parts:
                if self._complete or self._error is not None:
                    return None
                self._changed.wait()
            return self._parts.popleft()

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            torch.set_num_threads(1)  # of each part one thread makes all
            lane = _Lane(self._device, self._staging_bytes)
            while (part := self._next()) is not None:
                lane.bring(part)
            lane.finish()
        except BaseException as error:  # it is the thread that waits which raises it
            self._fail(error)


class _Lane:
    """One thread's buffers and stream."""

    def __init__(self, device: torch.device, staging_bytes: int):
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.set_device(device)
        self._staging_bytes = staging_bytes
        self._buffers: list[torch.Tensor] = []  # uint8
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._sent: list[Any] = [None, None]  # events: what a buffer held has left it
        self._turn = 0

    def bring(self, part: _Part) -> None:
        target = part.target
        if target.nbytes > self._staging_bytes:  # one row, longer than a buffer
            values = torch.empty(target.shape, dtype=target.dtype)
            part.read(part.first, values)
            target.copy_(values)
            return
        turn = self._turn
        self._turn = 1 - turn
        if len(self._buffers) <= turn:
            self._buffers.append(torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=self._cuda))
        if self._sent[turn] is not None:
            self._sent[turn].synchronize()
        staged = self._buffers[turn][: target.nbytes].view(target.dtype).view(target.shape)
        part.read(part.first, staged)
        if self._stream is None:
            target.copy_(staged)
            return
        # the memory may be that of a tensor which work sent before has still to read
        self._stream.wait_stream(torch.cuda.default_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            self._sent[turn] = torch.cuda.Event()
            self._sent[turn].record()

    def finish(self) -> None:
        """Everything has arrived."""
        if self._stream is not None:
            self._stream.synchronize()


def _parts(read: Read, target: torch.Tensor, staging_bytes: int) -> list[_Part]:
    """Parts of whole rows, each contiguous and, unless a single row is longer, no larger than a buffer."""
    if not target.numel():
        return []
    if not target.is_contiguous():  # a slice of every expert, say
        stride = target[0].numel() // target.shape[-1]
        found: list[_Part] = []
        for index in range(target.shape[0]):
            found += _parts(_behind(read, index * stride), target[index], staging_bytes)
        return found
    rows = target.view(-1, target.shape[-1])
    count = max(1, staging_bytes // (rows.shape[1] * rows.element_size()))
    return [_Part(read, first, rows[first : first + count]) for first in range(0, rows.shape[0], count)]


def _behind(read: Read, offset: int) -> Read:
    return lambda first, part: read(offset + first, part)
