"""The engine process: `python -m headrace.frontend.engine_process`, started by EngineClient.

Its standard input holds one line of JSON, an `EngineOrder`, and stays open as long as the API process lives: at its end
this process ends too, whatever it is doing. One thread reads messages between steps and steps while there is work.

What it steps is made by a factory, "module:function", so that tests and benchmarks can put a fake in its place.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import zmq

from headrace.config import EngineArgs
from headrace.core.loop import EngineCore
from headrace.core.request import Request, RequestError, TokenOutput
from headrace.frontend.ipc import (
    Abort,
    Add,
    Addresses,
    Answer,
    Ask,
    Died,
    EngineInfo,
    Inbox,
    News,
    Outbox,
    Ready,
    Rejected,
    Stats,
    Stop,
    ToEngine,
    engine_side,
)
from headrace.ledger.bill import Bill
from headrace.ledger.book import Ledger
from headrace.ledger.jsonl import to_line
from headrace.sampling.grammar import GrammarError

IDLE_WAIT, PREPARE_WAIT, QUIET_WAIT = 1.0, 0.005, 0.05  # seconds
LAST_WORDS = 2.0  # seconds that the API process has to read why the engine died
MAX_RECORDS = 1000  # step records in one answer
DEFAULT_FACTORY = "headrace.frontend.engine_process:real_engine"


class EngineOrder(msgspec.Struct, frozen=True):
    """What to start, and whom to talk to."""

    addresses: Addresses
    args: dict[str, Any]  # of EngineArgs
    factory: str = DEFAULT_FACTORY
    ledger_jsonl: str | None = None  # where step records and bills are written as they come


class ServedEngine(Protocol):
    """What the loop needs of an engine."""

    core: EngineCore
    ledger: Ledger

    def prepare(self, add: Add) -> Future[None] | None:
        """What must be done before `requests` is quick, done in another thread; None if there is nothing."""
        ...

    def requests(self, add: Add) -> list[Request]:
        """Those to be given to the core; RequestError if the prompt cannot be served."""
        ...

    def bill(self, request_id: str) -> Bill | None: ...

    def info(self) -> EngineInfo: ...

    def close(self) -> None: ...


class RealEngine:
    """A model on this machine."""

    def __init__(self, args: EngineArgs):
        from headrace.frontend.engine import Engine

        started = time.perf_counter()
        self._engine = engine = Engine(args)
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="headrace-grammar")
        self.core = engine.core
        self.ledger = engine.ledger
        self._load_seconds = time.perf_counter() - started

    def prepare(self, add: Add) -> Future[None] | None:
        grammar = add.params.grammar
        if grammar is None or self._engine.grammars.knows(grammar):
            return None

        def compile() -> None:
            with contextlib.suppress(GrammarError):  # it is met again, and told, in `requests`
                self._engine.grammars.matcher(grammar)

        return self._compilers.submit(compile)

    def requests(self, add: Add) -> list[Request]:
        prepared = self._engine.input.prepare(
            add.id, add.token_ids, add.params, priority=add.priority, cache_salt=add.cache_salt
        )
        for request in prepared.requests:
            request.arrival = min(add.arrival, request.arrival)
            request.batch = add.batch
        return prepared.queue

    def bill(self, request_id: str) -> Bill | None:
        return self._engine.bill(request_id)

    def info(self) -> EngineInfo:
        config, layout = self._engine.config, self.core.scheduler.kv.layout
        return EngineInfo(
            max_model_len=config.max_model_len,
            max_prompt_len=min(config.max_model_len, layout.num_tokens) - 1,
            max_num_seqs=config.max_num_seqs,
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            load_seconds=self._load_seconds,
            choices=[(choice.option, choice.value, choice.reason) for choice in self._engine.choices],
            proposers=config.proposers,
        )

    def close(self) -> None:
        self._engine.close()


def real_engine(args: EngineArgs) -> ServedEngine:
    """The default factory. Raises what `Engine` raises."""
    return RealEngine(args)


class EngineLoop:
    """Messages in, steps, messages out."""

    def __init__(self, engine: ServedEngine, inbox: Inbox[ToEngine], outbox: Outbox):
        self._engine = engine
        self._core = engine.core
        self._inbox = inbox
        self._outbox = outbox
        self._stopping = False
        self._told = Stats()
        self._preparing: dict[str, tuple[Future[None], Add]] = {}  # by the id of the prompt

    def run(self) -> None:
        """Until a Stop comes; raises what a step raises."""
        while not self._stopping:
            if not self._core.has_work:
                self._rest()
            for message in self._inbox.take():
                self._obey(message)
            for future, add in list(self._preparing.values()):
                if future.done():
                    del self._preparing[add.id]
                    self._add(add)
            if self._core.has_work and not self._stopping:
                outputs = self._core.step()
                self._tell(outputs)

    def _rest(self) -> None:
        """Until a message comes, or a second has passed. What prepares later steps is done a while after the last one,
        for between requests that follow each other it would be in their way."""
        if self._preparing:
            self._inbox.wait(PREPARE_WAIT)
            return
        if self._inbox.wait(QUIET_WAIT):
            return
        while self._core.idle():
            if self._inbox.wait(0.0):
                return
        self._inbox.wait(IDLE_WAIT)

    def _obey(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            future = self._engine.prepare(message)
            if future is None:
                self._add(message)
            else:
                self._preparing[message.id] = future, message
        elif isinstance(message, Abort):
            for request_id in message.ids:
                self._preparing.pop(request_id.partition("/")[0], None)
            self._tell(self._core.abort(message.ids, message.reason))
        elif isinstance(message, Ask):
            self._outbox.send(Answer(message.token, self._answer(message)))
        elif isinstance(message, Stop):
            self._stopping = True

    def _add(self, message: Add) -> None:
        queued: list[str] = []
        try:
            for request in self._engine.requests(message):
                self._core.add(request)
                queued.append(request.id)
        except (RequestError, ValueError) as error:
            self._core.abort(queued)
            self._outbox.send(Rejected(message.id, str(error)))

    def _answer(self, ask: Ask) -> bytes:
        if ask.what == "ledger":
            after, last = (int(number) for number in ask.argument.split())
            records = [each for each in self._engine.ledger.records(min(last, MAX_RECORDS)) if each.step_id > after]
            return "".join(to_line(record) + "\n" for record in records).encode()
        if ask.what == "bill":
            bill = self._engine.bill(ask.argument)
            return b"" if bill is None else to_line(bill).encode()
        return b"pong"

    def _tell(self, outputs: list[TokenOutput]) -> None:
        stats = self._stats()
        if outputs or stats != self._told:
            self._told = stats
            self._outbox.send(News(outputs, stats, self._queued(outputs)))

    def _queued(self, outputs: Iterable[TokenOutput]) -> dict[str, float]:
        queued = {}
        for output in outputs:
            if output.finish_reason is not None:
                bill = self._engine.ledger.bill(output.request_id)
                if bill is not None:
                    queued[output.request_id] = bill.queued / 1e9
        return queued

    def _stats(self) -> Stats:
        scheduler, totals = self._core.scheduler, self._engine.ledger.totals
        pool = scheduler.kv.pool
        return Stats(
            len(scheduler.running), len(scheduler.waiting), pool.num_held, pool.num_blocks, totals.steps,
            totals.prompt_tokens, totals.cached_tokens, totals.preemptions, totals.seconds_by_bound,
            totals.steps_by_bound, totals.draft_tokens, totals.accepted_draft_tokens,
            totals.drafts, totals.draft_positions, totals.draft_seconds, totals.wasted_seconds,
            totals.proposers_dropped, scheduler.backlog(),
        )  # fmt: skip


def _die_with_parent(addresses: Addresses) -> None:
    """End when standard input ends, for its other end belongs to the API process, which can no longer clean up."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        shutil.rmtree(os.path.dirname(addresses.to_api.removeprefix("ipc://")), ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> int:
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # the API process decides when this one ends
        signal.signal(number, signal.SIG_IGN)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOrder)
    _die_with_parent(order.addresses)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox, inbox = engine_side(context, order.addresses)
    engine: ServedEngine | None = None
    status = 0
    try:
        module, _, name = order.factory.partition(":")
        engine = getattr(importlib.import_module(module), name)(EngineArgs.make(**order.args))
        if order.ledger_jsonl is not None:
            engine.ledger.stream_to(order.ledger_jsonl)
        gc.collect()
        gc.freeze()  # the model stays: collections need not look at it again
        outbox.send(Ready(engine.info()))
        EngineLoop(engine, inbox, outbox).run()
    except BaseException as error:
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            summary = f"not enough memory ({error}): give less to the KV cache (kv_cache), or take a smaller model"
        user = engine is None and isinstance(error, (ValueError, OSError, MemoryError))
        outbox.send(Died(summary, summary if user else traceback.format_exc(), user))
        status = 1
    if engine is not None and not status:
        engine.close()
    inbox.close()
    outbox.close(LAST_WORDS)
    context.term()  # returns once the last words are out, or their time is over
    return status


if __name__ == "__main__":
    sys.stdout = sys.stderr  # nothing here may write into what the API process prints
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of native kernels and the watch need no farewell
