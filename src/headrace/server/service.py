"""Service: what all routes share. The model's text side, the engine's client, and who is let in.

States: loading -> ready -> draining -> (end); ready -> loading again when the engine is restarted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import asdict, replace

from headrace.config import EngineArgs
from headrace.frontend.engine_client import Death, EngineClient
from headrace.frontend.engine_process import DEFAULT_FACTORY
from headrace.frontend.input import InputProcessor
from headrace.frontend.ipc import EngineInfo, Stats
from headrace.server.admission import MOST_RETRY_AFTER, CallerLimit, Owners, check_first_token, retry_after
from headrace.server.errors import ApiError, bad_request, unavailable
from headrace.server.job import Job, PromptTokens
from headrace.server.metrics import Metrics
from headrace.server.model import ModelText
from headrace.server.options import ServerArgs
from headrace.server.protocol import ApiRequest
from headrace.server.responses.store import Store

logger = logging.getLogger("headrace.server")
_MEMORY = 0.9  # of the average time between ends of choices that a new one leaves as it is


class Service:
    """Made before the event loop runs; `start` starts the engine."""

    def __init__(
        self,
        args: ServerArgs,
        engine_args: EngineArgs,
        *,
        factory: str = DEFAULT_FACTORY,
        ledger_jsonl: str | None = None,
    ):
        """Raises what loading a model's text side raises."""
        self.args = args
        self.model = ModelText(engine_args, args.served_model_name, args.template_source())
        self.metrics = Metrics()
        self.client = EngineClient(
            asdict(engine_args),
            factory=factory,
            ledger_jsonl=ledger_jsonl,
            on_ready=self._ready,
            on_stats=self._stats,
            on_death=self._death,
        )
        self.responses = Store(args.max_stored)
        self._callers = CallerLimit(args.max_per_key)
        self.owners = Owners()
        self._first_token = None if engine_args.ttft_slo is None else engine_args.ttft_slo / 1e3  # seconds
        self.draining = False
        self.deaths: asyncio.Queue[Death] = asyncio.Queue()  # for whoever runs the service
        self.ready = asyncio.Event()
        self._jobs: set[Job] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._processor: InputProcessor | None = None
        self._between_ends = 0.1  # seconds between two choices that end, on average
        self._last_end = 0.0

    def start(self) -> None:
        """Start the engine process; in the event loop."""
        self.client.start()

    # -- the engine's news

    def _ready(self, info: EngineInfo) -> None:
        model = self.model
        self._processor = InputProcessor(model.tokenizer, model.spec, info.max_model_len, proposers=info.proposers)
        self.metrics.engine.up = 1
        self.metrics.engine.stats = Stats(blocks_total=info.num_blocks)
        self.ready.set()

    def _stats(self, stats: Stats) -> None:
        self.metrics.engine.stats = stats

    def _death(self, death: Death) -> None:
        self.metrics.engine.forget()
        self.ready.clear()
        self.deaths.put_nowait(death)

    @property
    def info(self) -> EngineInfo:
        """Of the engine; ApiError 503 while there is none."""
        if self.client.info is None:
            raise unavailable("the engine is not ready: it is loading, or gone")
        return self.client.info

    # -- requests

    def check_open(self) -> EngineInfo:
        """ApiError 503 while no new request is taken."""
        if self.draining:
            raise unavailable("the server is shutting down")
        return self.info

    def check_prompt(self, prompt: PromptTokens, param: str, room: int = 1) -> None:
        """ApiError 400 if a prompt cannot run; the engine would say so too, but later. `room`: tokens to come."""
        info, length = self.info, len(prompt.token_ids)
        most = info.max_prompt_len + 1 - room
        if not length:
            raise bad_request("the prompt has no tokens; give at least one", param)
        if length > most:
            raise ApiError(
                400,
                f"the prompt has {length} tokens; at most {most} fit with {room} to be generated "
                f"(max_model_len {info.max_model_len}): shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def isolated(self, request: ApiRequest, caller: str | None) -> ApiRequest:
        """With API keys, prefixes are shared within a key only: how fast an answer comes tells nothing of others."""
        if caller is None:
            return request
        salt = hashlib.sha256(f"{caller}:{request.cache_salt or ''}".encode()).hexdigest()
        return replace(request, cache_salt=salt, caller=caller)

    def submit(
        self, job_id: str, request: ApiRequest, prompts: list[PromptTokens], arrived: float, *, keep: bool
    ) -> Job:
        """Send a request to the engine, if there is room; ApiError 400, 429 or 503."""
        info = self.check_open()
        assert self._processor is not None
        count = len(prompts) * request.params.num_choices
        self._check_room(count, info)
        check_first_token(self.client.stats.backlog, self._first_token, request.batch)
        job = Job(
            job_id, request, prompts, client=self.client, tokenizer=self.model.tokenizer, metrics=self.metrics,
            arrived=arrived, keep=keep,
        )  # fmt: skip
        seconds = [limit for limit in (request.timeout, self.args.request_timeout) if limit]
        self._callers.take(request.caller, count)
        try:
            job.start(self._processor, min(seconds) if seconds else None)
        except BaseException:
            self._callers.give(request.caller, count)
            raise
        self.owners.note(job_id, request.caller)
        self._jobs.add(job)
        self._idle.clear()
        return job

    def echo(self, job_id: str, request: ApiRequest, prompts: list[PromptTokens], arrived: float) -> Job:
        """A request for its prompts alone, which is finished at once; ApiError 400 if their ids are no tokens."""
        self.check_open()
        assert self._processor is not None
        job = Job(
            job_id, request, prompts, client=self.client, tokenizer=self.model.tokenizer, metrics=self.metrics,
            arrived=arrived, keep=False,
        )  # fmt: skip
        job.echo(self._processor)
        return job

    def done(self, job: Job) -> None:
        """A job that was submitted has ended, and nobody reads it any more."""
        if job in self._jobs:
            self._jobs.remove(job)
            self._callers.give(job.request.caller, len(job.prompts) * job.request.params.num_choices)
        if not self._jobs:
            self._idle.set()
        now = time.monotonic()
        share = (now - self._last_end) / max(1, len(job.outputs) * job.request.params.num_choices)
        if self._last_end:
            self._between_ends = _MEMORY * self._between_ends + (1 - _MEMORY) * min(share, MOST_RETRY_AFTER)
        self._last_end = now

    def _check_room(self, count: int, info: EngineInfo) -> None:
        room, alive = info.max_num_seqs + self.args.max_queue, self.client.num_alive
        if count > room:
            raise bad_request(f"{count} choices are asked for at once; at most {room} are taken (max_queue)")
        if alive + count > room:
            over = alive + count - room
            seconds = retry_after(over * self._between_ends)
            stats = self.client.stats
            raise ApiError(
                429,
                f"the queue is full: {alive} choices are in the engine and {room} may be; try again in {seconds} s",
                code="queue_full",
                headers={"retry-after": seconds},
                extra={"queue": {"alive": alive, "running": stats.running, "waiting": stats.waiting, "limit": room}},
            )

    # -- the end

    async def drain(self, seconds: float) -> bool:
        """Take no new requests and wait for those there are; after `seconds` they are cut. Whether all finished."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
            return True
        except TimeoutError:
            self.cut("the server is shutting down and the time for running requests is over")
            return False

    def cut(self, message: str) -> None:
        """End every request with an error."""
        for job in list(self._jobs):
            job.cut(unavailable(message))

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    async def close(self, seconds: float) -> None:
        """Let go of everything; the engine gets so long to end by itself."""
        await self.client.close(seconds)
        self.model.close()
