"""Kernels that are compiled before they are needed, several at once.

Triton compiles a kernel when it is first called, one after the other: an engine that starts with an empty cache waits
for dozens. Here the calls of steps that run nowhere (on torch's meta device, worker/rehearsal.py) are noted, and what
they need is compiled by threads while the weights are read. Triton lets go of Python's lock in all its stages but the
first, so threads are enough, and what they compile is in Triton's own cache under Triton's own key. A call whose
variant a thread has begun waits for it; one whose variant no thread has begun compiles it itself. So nothing is
compiled twice, and a thread that fails costs nothing: the call meets the same error, and tells it.

Beside the kernel itself, Triton builds a C function that launches it, one for each list of argument types; a compiler
of C takes as long for it as Triton for a small kernel, so it is built ahead too. Nothing here touches the GPU: modules
are loaded by the calls, since loading may not run beside the capture of a graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from headrace.ops.triton.runtime import INTERPRETED, KNOWN_INSIDE, RUNTIME, Kernel
from headrace.ops.triton.tile_table import measured_tiles

Key = tuple[Any, ...]
MOST_THREADS = 12  # Python's lock, which the first stage holds, keeps more from being of use
_POLL = 0.2  # seconds after which a thread looks whether the process ends


@dataclass
class Job:
    """One variant of a kernel."""

    kernel: Kernel
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    begun: bool = False
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class AheadCounts:
    """What was done before it was asked for."""

    noted: int = 0  # variants
    compiled: int = 0  # by threads, or found in Triton's cache by them
    failed: int = 0
    waited: int = 0  # calls that came while their variant was compiled
    waited_seconds: float = 0.0
    seconds: float = 0.0  # from the first job's begin to the last one's end

    def lines(self) -> list[str]:
        """What a person wants to know of them."""
        return [
            f"kernels: {self.compiled} of {self.noted} variants that were foreseen were ready ahead, after "
            f"{self.seconds:.1f} s; calls waited {self.waited_seconds:.2f} s for {self.waited} of them"
        ]


class Ahead:
    """Notes calls, and compiles what they need. Its threads are the only users of `compile`."""

    def __init__(self, num_threads: int, compile: Callable[[Job], None] | None = None):
        """`compile`: what a thread does with a job; None: Triton's compiler, for the GPU of the thread that asks."""
        self.recording = False
        self.counts = AheadCounts()
        self._compile = compile or Compiler()
        self._num_threads = num_threads
        self._jobs: dict[tuple[int, Key], Job] = {}
        self._waiting: list[Job] = []  # the next one last
        self._changed = threading.Condition()
        self._held = False  # steps run, which need Python's lock more
        self._stopped = False
        self._started = 0.0
        self._num_ended = 0
        self._after: Callable[[], None] | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Calls of kernels inside only note what they need, in the order in which it is to be compiled."""
        before, RUNTIME.launches, self.recording = RUNTIME.launches, self, True
        try:
            yield
        finally:
            RUNTIME.launches, self.recording = before, False

    def note(self, kernel: Kernel, key: Key, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """See Launches."""
        if (id(kernel), key) not in self._jobs:
            self._jobs[id(kernel), key] = Job(kernel, arguments, constants)
            self.counts.noted += 1

    @property
    def jobs(self) -> list[Job]:
        """All that were noted, in order."""
        return list(self._jobs.values())

    def start(self, after: Callable[[], None] | None = None) -> None:
        """Begin to compile. `after` is called once all is compiled, by a thread; not if anything failed."""
        RUNTIME.launches, self._after = self, after
        self._waiting = self.jobs[::-1]
        self._started = time.perf_counter()
        for number in range(min(self._num_threads, len(self._waiting))):
            # no daemons: the interpreter must not end while one is inside the compiler
            threading.Thread(target=self._work, name=f"headrace-compile-{number}").start()

    def settle(self, kernel: Kernel, key: Key) -> None:
        """See Launches."""
        job = self._jobs.get((id(kernel), key))
        if job is None:
            return
        with self._changed:
            mine, job.begun = not job.begun, True
        if mine:
            self._end(job)
        elif not job.done.is_set():
            started = time.perf_counter()
            job.done.wait()
            self.counts.waited += 1
            self.counts.waited_seconds += time.perf_counter() - started

    def hold(self) -> None:
        """Begin no more jobs until `go_on`: steps run."""
        self._held = True

    def go_on(self) -> None:
        """The engine is idle."""
        if self._held:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin no more jobs, for good."""
        if RUNTIME.launches is self:
            RUNTIME.launches = None
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def num_left(self) -> int:
        """Jobs that nobody has begun."""
        with self._changed:
            return sum(not job.begun for job in self._waiting)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all jobs end within `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        return all(job.done.wait(None if end is None else max(0.0, end - time.monotonic())) for job in self.jobs)

    def _next(self) -> Job | None:
        """The next job, once there may be one; None: there is none left."""
        with self._changed:
            while not self._stopped and threading.main_thread().is_alive():
                while self._waiting and self._waiting[-1].begun:
                    self._waiting.pop()
                if not self._waiting:
                    return None
                if not self._held:
                    job = self._waiting.pop()
                    job.begun = True
                    return job
                self._changed.wait(_POLL)
        return None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._compile(job)
            except Exception:  # whoever calls the kernel meets the same, and has to tell it
                self._end(job, failed=1)
            else:
                self._end(job, compiled=1)

    def _end(self, job: Job, compiled: int = 0, failed: int = 0) -> None:
        with self._changed:  # of several threads' sums none is lost
            self.counts.compiled += compiled
            self.counts.failed += failed
            self.counts.seconds = time.perf_counter() - self._started
            self._num_ended += 1
            last = self._num_ended == len(self._jobs)
        job.arguments = ()
        job.done.set()
        if last and not self.counts.failed and self._after is not None:
            self._after()


class Compiler:
    """Triton's own way to a compiled variant and its launcher, short of the GPU."""

    def __init__(self) -> None:
        self._locks: dict[Key, threading.Lock] = {}
        self._lock = threading.Lock()
        # another thread's may be another one
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def __call__(self, job: Job) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        with self._lock:  # made once
            active = driver.active
        compiled = job.kernel.jit.run(*job.arguments, grid=(1,), warmup=True, **job.constants)
        with self._lock:
            lock = self._locks.setdefault(tuple(compiled.src.signature.values()), threading.Lock())
        with lock:  # of those with the same types one builds, and the others find it
            active.launcher_cls(compiled.src, compiled.metadata)


def can_compile_ahead() -> bool:
    """Whether kernels are compiled at all, by a Triton whose inside is known."""
    return KNOWN_INSIDE and not INTERPRETED


class Mark:
    """A file beside Triton's kernels, there once all that `facts` need has been compiled: the next start need not look.
    Another GPU, another Triton or other kernels have marks of their own, and who empties the cache removes them."""

    def __init__(self, *facts: object):
        target = driver.active.get_current_target()
        said = repr((triton.__version__, target, _sources(), *facts))
        folder = Path(triton.knobs.cache.dir) / "headrace"
        self._path = folder / hashlib.sha256(said.encode()).hexdigest()[:32]

    @property
    def there(self) -> bool:
        return self._path.exists()

    def leave(self) -> None:
        """Nothing is said where it cannot be written: the next start looks again."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()


def _sources() -> str:
    """A digest of what decides which kernels are called, and what they are."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for folder in ("ops/triton", "attention", "layers", "models", "quant", "worker"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update(repr(sorted(measured_tiles().items(), key=repr)).encode())
    return digest.hexdigest()
