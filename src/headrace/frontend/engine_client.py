"""EngineClient: the API process's end of the engine. Starts the engine process, routes what it says, notices its death.

Everything here runs in the event loop's thread and nothing blocks it: messages are small and read when they have come,
and two threads wait for what has no descriptor to wait on (the process's end, its standard error).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

from headrace.core.request import FinishReason, TokenOutput
from headrace.frontend.engine_process import DEFAULT_FACTORY, EngineOrder
from headrace.frontend.ipc import (
    Abort,
    Add,
    Answer,
    Ask,
    Died,
    EngineInfo,
    Inbox,
    News,
    Outbox,
    PrivateFolder,
    Ready,
    Rejected,
    Stats,
    Stop,
    ToApi,
    api_side,
)

logger = logging.getLogger("headrace.server")
STDERR_LINES = 200  # kept, for the cause of a death
BATCH = 64  # messages read before the event loop gets a turn
_EXIT_GRACE = 0.2  # seconds in which the last message of a dying process may still come


class EngineGoneError(RuntimeError):
    """The engine is not there: not yet, not any more, or it does not answer."""


@dataclass(frozen=True)
class Death:
    """Why an engine process ended by itself."""

    summary: str  # one line
    cause: str  # the whole of it
    while_loading: bool
    fault_of_user: bool


class Sink(Protocol):
    """Who waits for a request."""

    def take(self, output: TokenOutput, queued: float | None) -> None:
        """A step brought this; `queued` is the seconds that it waited for admission, when it ended and they are
        known."""
        ...

    def refuse(self, message: str) -> None:
        """The engine cannot serve the prompt."""
        ...

    def lose(self, death: Death) -> None:
        """The engine died with it."""
        ...


class EngineClient:
    """One engine process at a time. `on_death` is called once a death has been told to every sink."""

    def __init__(
        self,
        args: dict[str, Any],
        *,
        factory: str = DEFAULT_FACTORY,
        ledger_jsonl: str | None = None,
        on_ready: Callable[[EngineInfo], None] = lambda info: None,
        on_stats: Callable[[Stats], None] = lambda stats: None,
        on_death: Callable[[Death], None] = lambda death: None,
    ):
        self._args = args
        self._factory = factory
        self._ledger_jsonl = ledger_jsonl
        self._on_ready, self._on_stats, self._on_death = on_ready, on_stats, on_death
        self.info: EngineInfo | None = None  # while an engine is ready
        self.stats = Stats()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder: PrivateFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self._inbox: Inbox[ToApi] | None = None
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._stderr_thread: threading.Thread | None = None
        self._died: Died | None = None
        self._stopping = False
        self._sinks: dict[str, Sink] = {}  # of every request alive; several may have one sink
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._tokens = itertools.count()

    # -- the process

    def start(self) -> None:
        """Start an engine process; `on_ready` tells when it has loaded. In the event loop."""
        loop = asyncio.get_running_loop()
        self._folder = PrivateFolder()
        self._outbox, self._inbox = api_side(self._context, self._folder.addresses)
        loop.add_reader(self._inbox.descriptor, self._read, self._inbox)
        self._died, self._stderr = None, deque(maxlen=STDERR_LINES)
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.frontend.engine_process"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the API process alone
        )
        self._process = process
        assert process.stdin is not None
        order = EngineOrder(self._folder.addresses, self._args, self._factory, self._ledger_jsonl)
        with contextlib.suppress(BrokenPipeError):  # it died at once, which is noticed below
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
        self._stderr_thread = threading.Thread(target=self._relay, args=(process, self._stderr), daemon=True)
        self._stderr_thread.start()
        threading.Thread(target=self._await_end, args=(process, loop), daemon=True).start()

    @staticmethod
    def _relay(process: subprocess.Popen[bytes], lines: deque[str]) -> None:
        """Pass the engine's standard error on, and keep its end."""
        assert process.stderr is not None
        for line in process.stderr:
            text = line.decode("utf-8", "replace")
            lines.append(text)
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text)
                sys.stderr.flush()

    def _await_end(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._ended, process)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        if process is self._process and not self._stopping:
            asyncio.get_running_loop().create_task(self._bury(process))

    async def _bury(self, process: subprocess.Popen[bytes]) -> None:
        deadline = asyncio.get_running_loop().time() + _EXIT_GRACE
        while self._died is None and asyncio.get_running_loop().time() < deadline:
            if self._inbox is not None:
                self._read(self._inbox)
            await asyncio.sleep(0.01)
        if self._stderr_thread is not None:
            self._stderr_thread.join(0.1)
        death = self._death(process)
        self._forget()
        sinks, self._sinks = list(dict.fromkeys(self._sinks.values())), {}
        for sink in sinks:
            sink.lose(death)
        for future in self._questions.values():
            if not future.done():
                future.set_exception(EngineGoneError(death.summary))
        self._questions.clear()
        self._on_death(death)

    def _death(self, process: subprocess.Popen[bytes]) -> Death:
        loading = self.info is None
        if self._died is not None:
            return Death(self._died.summary, self._died.cause, loading, self._died.fault_of_user)
        code = process.returncode
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            hint = "; the kernel does this when memory runs out" if -code == signal.SIGKILL else ""
            summary = f"the engine process was ended by {name}{hint}"
        else:
            summary = f"the engine process ended with status {code}"
        tail = "".join(self._stderr).rstrip()
        return Death(summary, summary + (f"\nwhat it last wrote:\n{tail}" if tail else ""), loading, False)

    def _forget(self) -> None:
        """Let go of a process that has ended, and of what led to it."""
        self.info, self.stats = None, Stats()
        if self._inbox is not None:
            asyncio.get_running_loop().remove_reader(self._inbox.descriptor)
            self._inbox.close()
        if self._outbox is not None:
            self._outbox.close()
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._folder is not None:
            self._folder.close()
        self._inbox = self._outbox = self._process = self._folder = None

    async def close(self, seconds: float) -> None:
        """End the process, by force if it has not ended by itself within so long; requests that run are forgotten."""
        self._stopping = True
        process = self._process
        if process is not None:
            if self._outbox is not None:
                self._outbox.send(Stop())
            try:
                await asyncio.to_thread(process.wait, seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        self._forget()
        self._context.destroy(linger=0)

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return None if self._process is None else self._process.pid

    # -- requests

    def add(self, prompt: Add, request_ids: list[str], sink: Sink) -> None:
        """Queue a prompt; `sink` hears of each of `request_ids` until it ends. EngineGoneError if no engine is
        ready."""
        if self.info is None or self._outbox is None:
            raise EngineGoneError("the engine is not ready")
        for request_id in request_ids:
            self._sinks[request_id] = sink
        self._outbox.send(prompt)

    def abort(self, request_ids: list[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests; their sinks hear nothing more."""
        alive = [request_id for request_id in request_ids if self._sinks.pop(request_id, None) is not None]
        if alive and self._outbox is not None:
            self._outbox.send(Abort(alive, reason))

    @property
    def num_alive(self) -> int:
        """Requests (choices) that have not ended."""
        return len(self._sinks)

    async def ask(self, what: str, argument: str = "", *, seconds: float) -> bytes:
        """A question that is answered between two steps; EngineGoneError if it is not, within so many seconds."""
        if self.info is None or self._outbox is None:
            raise EngineGoneError("the engine is not ready")
        token = next(self._tokens)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[token] = future
        self._outbox.send(Ask(token, what, argument))
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            raise EngineGoneError(f"the engine has not answered within {seconds:g} s") from None
        finally:
            self._questions.pop(token, None)

    # -- what comes

    def _read(self, inbox: Inbox[ToApi]) -> None:
        """The descriptor tells of news once, so what is left after a batch is read at the loop's next turn."""
        if inbox is not self._inbox:
            return
        for count, message in enumerate(inbox.take(), 1):
            try:
                self._hear(message)
            except Exception:  # what one request trips over must not stop the others
                logger.exception("a message of the engine could not be handled")
            if count == BATCH:
                asyncio.get_running_loop().call_soon(self._read, inbox)
                return

    def _hear(self, message: ToApi) -> None:
        if isinstance(message, News):
            self.stats = message.stats
            self._on_stats(message.stats)
            for output in message.outputs:
                sink = self._sinks.get(output.request_id)
                if sink is not None:
                    if output.finish_reason is not None:
                        del self._sinks[output.request_id]
                    sink.take(output, message.queued.get(output.request_id))
        elif isinstance(message, Answer):
            future = self._questions.pop(message.token, None)
            if future is not None and not future.done():
                future.set_result(message.data)
        elif isinstance(message, Rejected):
            self._reject(message)
        elif isinstance(message, Ready):
            self.info = message.info
            self._on_ready(message.info)
        elif isinstance(message, Died):
            self._died = message

    def _reject(self, message: Rejected) -> None:
        """An Add was refused: all requests named after it."""
        prefix = message.id + "/"
        ids = [key for key in self._sinks if key == message.id or key.startswith(prefix)]
        sinks = {id(self._sinks[key]): self._sinks.pop(key) for key in ids}
        for sink in sinks.values():
            sink.refuse(message.message)
