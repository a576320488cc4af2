"""AsyncLLM: the engine for asyncio programs. It steps in one background thread; callers await or iterate.

Everything that touches the engine happens in that thread, between steps: callers post commands to it, and it posts what
came to a channel for each request. A channel holds at most one pending update a choice, since what a slow consumer did
not take yet is merged, so memory stays in proportion to the answers themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from headrace.config import EngineArgs
from headrace.frontend.engine import Engine
from headrace.frontend.input import Prompt
from headrace.frontend.output import RequestOutput, Update
from headrace.ledger.bill import Bill
from headrace.ledger.explain import summarize
from headrace.sampling.params import SamplingParams

_Command = Callable[[], None]


class EngineDeadError(RuntimeError):
    """The engine failed or was closed; what it was asked for cannot be finished."""


class AsyncLLM:
    """A model, ready to generate; use it with `async with`, or call `close`.

    Takes what `LLM` takes. Loading takes seconds and happens here, before any event loop need run. Several tasks may
    use it at once, from several event loops. Cancelling a task ends what it waits for and frees its memory. When a
    step fails, everything that waits, and everything asked later, raises EngineDeadError with the cause.
    """

    def __init__(self, model: str | None = None, **options: Any):
        self._start(Engine(EngineArgs.make(model=model, **options)))

    @classmethod
    def from_engine(cls, engine: Engine) -> AsyncLLM:
        """On an engine that nobody else uses from now on."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._driver = _Driver(engine)

    @property
    def default_params(self) -> SamplingParams:
        """Used where no parameters are given: what the model's authors recommend."""
        return self._engine.default_params

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> RequestOutput:
        """Complete one prompt (text or token ids). RequestError if it cannot be served. Further keywords are those of
        `Engine.submit`: request_id, add_special, priority, cache_salt."""
        channel = self._submit(prompt, params, request, keep=False)
        try:
            while await channel.take():
                pass
        finally:
            self._driver.abort(channel)
        assert channel.output is not None
        return channel.output

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> AsyncIterator[Update]:
        """Complete one prompt, an update a step or, when they are taken slowly, of several steps. `update.choice`
        grows in the background and may be ahead of the updates taken. Leaving the loop ends the request (at once
        with contextlib.aclosing). Keywords as in `generate`."""
        channel = self._submit(prompt, params, request, keep=True)
        try:
            while updates := await channel.take():
                for update in updates:
                    yield update
        finally:
            self._driver.abort(channel)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template: Any
    ) -> RequestOutput:
        """Answer one conversation, rendered with the model's chat template; keywords go to the template."""
        return await self.generate(self.render(messages, **template), params)

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        return self._engine.render(messages, **template)

    async def bill(self, output: RequestOutput) -> Bill | None:
        """Where a prompt's time went; None where no ledger is kept, or no longer."""
        return await self._driver.call(lambda: self._engine.bill(output.request_id))

    async def explain(self) -> str:
        """Where the time of the steps so far went, and what bound them."""
        return await self._driver.call(lambda: summarize(self._engine.ledger))

    async def close(self) -> None:
        """End what runs (whoever waits for it gets what there is, finish reason abort) and free the model. Calling it
        again does nothing."""
        self._driver.stop()
        await asyncio.to_thread(self._driver.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _submit(self, prompt: Prompt, params: SamplingParams | None, request: dict[str, Any], keep: bool) -> _Channel:
        channel = _Channel(asyncio.get_running_loop(), keep)
        self._driver.submit(channel, lambda: self._engine.submit(prompt, params, **request))
        return channel


class _Channel:
    """One request's way back to the task that waits for it. `put` and `finish` are the engine thread's, `take` is the
    loop's. With `keep` False updates only wake the task."""

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: bool):
        self.output: RequestOutput | None = None  # once submitted
        self.loop = loop
        self._keep = keep
        self._lock = threading.Lock()
        self._pending: dict[int, list[Update]] = {}  # id() of a choice -> one update, or several not merged yet
        self._finished = False
        self._error: BaseException | None = None
        self._ready = asyncio.Event()
        self._told = False  # the loop has been asked to set _ready

    @property
    def finished(self) -> bool:
        return self._finished

    def put(self, update: Update) -> None:
        if self._keep:
            with self._lock:
                waiting = self._pending.setdefault(id(update.choice), [])
                waiting.append(update)
                if len(waiting) >= _MERGE_EVERY:
                    waiting[:] = [_merged(waiting)]

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing more comes."""
        with self._lock:
            self._finished, self._error = True, error

    def needs_telling(self) -> bool:
        """Something is there to take and the loop has not been told; it counts as told from now on."""
        with self._lock:
            news = not self._told and (bool(self._pending) or self._finished)
            self._told = self._told or news
            return news

    def wake(self) -> None:
        """In the loop: let `take` look."""
        self._ready.set()

    async def take(self) -> list[Update]:
        """What came since the last call, one update a choice, waiting for some; [] when the request has ended. Raises
        what ended it, once all before it has been taken."""
        while True:
            await self._ready.wait()
            with self._lock:
                pending, self._pending = self._pending, {}
                finished, error = self._finished, self._error
                if not finished:
                    self._ready.clear()
                    self._told = False
            if pending:
                return [_merged(updates) for updates in pending.values()]
            if error is not None:
                raise error
            if finished:
                return []


_MERGE_EVERY = 64  # updates that wait unmerged: joining texts one by one would take quadratic time


def _merged(updates: Sequence[Update]) -> Update:
    """Updates of one choice as one."""
    if len(updates) == 1:
        return updates[0]
    reported = [update.logprobs for update in updates if update.logprobs is not None]
    return Update(
        updates[-1].output,
        updates[-1].choice,
        "".join(update.text for update in updates),
        [token for update in updates for token in update.token_ids],
        [entry for entries in reported for entry in entries] if reported else None,
    )


class _Driver:
    """The thread that owns the engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._channels: dict[int, _Channel] = {}  # id() of an output -> its channel
        self._lock = threading.Lock()  # no command may be posted once the thread has looked for the last time
        self._stopping = False
        self._dead: tuple[str, BaseException | None] | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    # -- any thread

    def submit(self, channel: _Channel, submit: Callable[[], RequestOutput]) -> None:
        """Start a request; what becomes of it comes through the channel."""

        def start() -> None:
            try:
                channel.output = submit()
            except Exception as error:  # a refused prompt is its caller's affair
                channel.finish(error)
                self._tell([channel])
                return
            self._channels[id(channel.output)] = channel

        self._post(start)

    def abort(self, channel: _Channel) -> None:
        """End a request if it has not ended; its caller no longer listens."""
        if not channel.finished:
            with contextlib.suppress(EngineDeadError):
                self._post(lambda: self._abort(channel))

    async def call(self, function: Callable[[], Any]) -> Any:
        """The function's value, computed between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(set_: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set_(value)

        def run() -> None:
            try:
                value = function()
            except Exception as error:
                loop.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, value)

        self._post(run)
        return await future

    def stop(self) -> None:
        """Ask the thread to end after its present step."""
        with contextlib.suppress(EngineDeadError):
            self._post(self._stop)

    def join(self) -> None:
        self._thread.join()

    def _post(self, command: _Command) -> None:
        with self._lock:
            if self._dead is not None:
                raise _dead(*self._dead)
            self._commands.put(command)

    # -- the engine's thread

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while not self._stopping:
                self._obey(wait=not self._engine.has_work)
                if not self._stopping and self._engine.has_work:
                    self._deliver(self._engine.step())
            for channel in list(self._channels.values()):
                self._abort(channel)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            cause = error
        self._die(cause)

    def _obey(self, wait: bool) -> None:
        """Run the commands that wait; with `wait`, at least one."""
        with contextlib.suppress(queue.Empty):
            while not self._stopping:
                self._commands.get(block=wait)()
                wait = False

    def _stop(self) -> None:
        self._stopping = True

    def _abort(self, channel: _Channel) -> None:
        if channel.output is not None and not channel.output.finished:
            self._deliver(self._engine.abort(channel.output))

    def _deliver(self, updates: Iterable[Update]) -> None:
        touched: dict[int, _Channel] = {}
        for update in updates:
            key = id(update.output)
            channel = self._channels.get(key)
            if channel is None:
                continue
            channel.put(update)
            touched[key] = channel
        for key, channel in touched.items():
            if channel.output is not None and channel.output.finished:
                channel.finish()
                del self._channels[key]
        self._tell(touched.values())

    @staticmethod
    def _tell(channels: Iterable[_Channel]) -> None:
        """Wake the tasks that wait, with one call a loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Channel]] = {}
        for channel in channels:
            if channel.needs_telling():
                by_loop.setdefault(channel.loop, []).append(channel)
        for loop, news in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(_wake, news)

    def _die(self, cause: BaseException | None) -> None:
        """Refuse what comes from now on, tell whoever waits, and let go of the model."""
        text = "the engine was closed" if cause is None else f"the engine failed: {type(cause).__name__}: {cause}"
        with self._lock:
            self._dead = text, cause
        while True:  # commands that came too late: their channels must hear of it
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            with contextlib.suppress(Exception):
                command()
        for channel in self._channels.values():
            channel.finish(_dead(text, cause))
        self._tell(self._channels.values())
        self._channels.clear()
        with contextlib.suppress(Exception):
            self._engine.close()


def _dead(text: str, cause: BaseException | None) -> EngineDeadError:
    """One for each task: an exception raised in several would gather the tracebacks of all."""
    error = EngineDeadError(text)
    error.__cause__ = cause
    return error


def _wake(channels: Sequence[_Channel]) -> None:
    for channel in channels:
        channel.wake()
