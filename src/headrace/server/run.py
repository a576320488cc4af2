"""Running the server: sockets, signals, the engine's death, and the end.

SIGTERM and Ctrl-C: no new requests, running ones finish or the drain's time is over, then the end with status 0. A
second one ends at once. An engine that dies ends the process with status 1, or is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.config import ConfigError
from headrace.frontend.engine_client import Death
from headrace.server.app import App
from headrace.server.errors import ApiError
from headrace.server.http import ErrorShape
from headrace.server.service import Service

logger = logging.getLogger("headrace.server")
MOST_RESTARTS, RESTART_WINDOW = 5, 300.0  # more deaths within so many seconds are no accident
FLUSH_SECONDS = 1.0  # for errors to reach the clients before the process ends
BACKLOG = 2048
SEND_BUFFER = 128 * 2**10  # bytes that the kernel keeps for a client that reads slowly; it takes twice of it
CLOSE_SECONDS = 5.0  # for the engine to end, when nothing runs in it
KEEP_ALIVE = 75  # seconds
EXIT_ENGINE_DIED = 1
EXIT_BAD_INPUT = 2


def serve(service: Service) -> int:
    """Serve until told to stop; the exit status. ConfigError if the address cannot be listened at."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.raiseExceptions = False  # a full disk must not turn log lines into tracebacks
    logger.setLevel(logging.INFO)
    _raise_file_limit()
    with _listen(service.args.host, service.args.port) as listener:
        return asyncio.run(_Runner(service, listener).run())


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _protocol(seconds: float, write_seconds: float) -> type[H11Protocol]:
    """HTTP/1.1 that does not wait for ever: for the head of a request, or for a client to take what was sent.

    A first head must be there within `seconds`; so must a later one from its first byte on.

    What the kernel's buffer (SEND_BUFFER) does not hold is kept here, and no more is written until the client has taken
    it; one that takes nothing for `write_seconds` is cut off, which ends its request as any client's going does.
    """

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # paused as soon as anything waits
            self._writing: asyncio.TimerHandle | None = None
            self._head: asyncio.TimerHandle | None = self.loop.call_later(seconds, self._close_for_head)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting_for_head()
            elif self._head is None and not self.transport.is_closing():  # a part of the next head
                self._head = self.loop.call_later(seconds, self._close_for_head)

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP is refused in the shape of other errors, unless an answer has begun."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = ErrorShape().body(ApiError(400, "this is no valid HTTP request"))
                headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
                answer = (
                    h11.Response(status_code=400, headers=list(headers.items()), reason="Bad Request"),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                )
                self.transport.write(b"".join(self.conn.send(part) or b"" for part in answer))
            self.transport.close()

        def _close_for_head(self) -> None:
            self._head = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

        def _stop_waiting_for_head(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._writing = self.loop.call_later(write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_waiting()
            self._stop_waiting_for_head()

        def _stop_waiting(self) -> None:
            if self._writing is not None:
                self._writing.cancel()
                self._writing = None

    return Protocol


class _Runner:
    def __init__(self, service: Service, listener: socket.socket):
        self._service = service
        self._listener = listener
        self._status = 0
        self._deaths: deque[float] = deque(maxlen=MOST_RESTARTS + 1)
        self._signals = 0
        self._gently = True  # nothing was cut short
        self._tasks: set[asyncio.Task[None]] = set()
        config = uvicorn.Config(
            App(service),
            http=_protocol(service.args.body_timeout, service.args.write_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nobody asks where a client is
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(FLUSH_SECONDS),
        )
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        self._server = _Server(config)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self._service.start()
        self._begin(self._watch_engine())
        self._begin(self._announce())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            for task in self._tasks:
                task.cancel()
            await self._service.close(CLOSE_SECONDS if self._gently else CLOSE_SECONDS / 5)
        return self._status

    def _begin(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        logger.info("listening at http://%s:%d; the model is being loaded", name, port)
        await self._service.ready.wait()
        gc.collect()
        gc.freeze()  # tokenizer and templates stay: collections need not look at them again
        info = self._service.info
        logger.info(
            "ready after %.1f s: model %s, %d tokens at most, %d choices at once, %d blocks of %d tokens",
            info.load_seconds, ", ".join(self._service.model.names), info.max_model_len, info.max_num_seqs,
            info.num_blocks, info.block_size,
        )  # fmt: skip

    # -- the end

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._begin(self._drain())
        else:
            logger.info("stopping at once")
            self._gently = False
            self._service.cut("the server was stopped")
            self._stop()

    async def _drain(self) -> None:
        seconds = self._service.args.drain_timeout
        if self._service.num_jobs:
            logger.info("draining: %d requests have up to %g s to finish", self._service.num_jobs, seconds)
        self._gently = await self._service.drain(seconds)
        self._stop()

    def _stop(self) -> None:
        self._server.should_exit = True

    # -- the engine's death

    async def _watch_engine(self) -> None:
        while True:
            death = await self._service.deaths.get()
            if not self._restart(death):
                break
        await asyncio.sleep(0)  # writers of the requests that were lost come first
        self._stop()

    def _restart(self, death: Death) -> bool:
        """Start the engine again, if that is wanted and makes sense."""
        if death.while_loading and death.fault_of_user:
            print(f"headrace: error: {' '.join(death.summary.split())}", file=sys.stderr)
            self._status = EXIT_BAD_INPUT
            return False
        logger.error("the engine died: %s", death.cause)
        self._status = EXIT_ENGINE_DIED
        self._deaths.append(time.monotonic())
        if self._service.args.on_engine_death == "exit" or self._signals:
            return False
        if death.while_loading:
            logger.error("it died while loading, so it is not started again")
            return False
        if len(self._deaths) > MOST_RESTARTS and self._deaths[-1] - self._deaths[0] < RESTART_WINDOW:
            logger.error(
                "it died %d times within %.0f s, so it is not started again", MOST_RESTARTS + 1, RESTART_WINDOW
            )
            return False
        self._status = 0
        self._service.metrics.engine.restarts += 1
        logger.info("starting the engine again")
        self._service.start()
        return True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # asyncio sends small parts at once (TCP_NODELAY) only on sockets that are said to be TCP
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections have it from here
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from None
    return listener


def _raise_file_limit() -> None:
    """Each connection takes a descriptor; the soft limit is often 1024."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16) if hard > 0 else soft, hard))
