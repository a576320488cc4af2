"""Job: one API request in the engine, from its prompts to its last token, and the channel to whoever writes its answer.

What a slow reader has not taken yet is merged, one delta a choice, so a job's memory is bounded by its own answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.plan import TokenLogprobs
from headrace.core.request import FinishReason, RequestError, TokenOutput
from headrace.frontend.engine_client import Death, EngineClient, EngineGoneError
from headrace.frontend.input import InputProcessor
from headrace.frontend.ipc import Add
from headrace.frontend.output import ChoiceStream, CompletionOutput, RequestOutput, Update
from headrace.frontend.tokenizer import Tokenizer
from headrace.sampling.params import NONE_ALLOWED
from headrace.server.errors import ApiError, bad_request, unavailable
from headrace.server.http import ClientGoneError
from headrace.server.metrics import Metrics
from headrace.server.protocol import ApiRequest


@dataclass(slots=True)
class PromptTokens:
    """A prompt ready for the engine."""

    text: str | None  # as it came; None: it came as token ids, or is a rendered chat
    token_ids: list[int]
    rendered: str = ""  # of a chat


class _Reasoning:
    """Counts a choice's tokens of reasoning as they come, the tags around it included."""

    def __init__(self, request: ApiRequest, tokenizer: Tokenizer):
        assert request.plan is not None
        self._parser = request.plan.parser()
        self._detokenizer = tokenizer.detokenizer(request.params.skip_special_tokens, request.kept)
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        parser = self._parser
        for token in token_ids:
            if not parser.may_think:
                break
            before = parser.thinking
            parser.feed(self._detokenizer.add([token]))
            self.count += before or parser.thinking


@dataclass(slots=True)
class Delta:
    """What came for one choice since the last look."""

    index: int  # among the choices of the whole API request: prompts in order, their choices in order
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return self.texts[0] if len(self.texts) == 1 else "".join(self.texts)


class Job:
    """A `Sink` of the engine's client. Made, started and read in the event loop; ended by its last choice, `abandon`,
    a deadline or an error."""

    def __init__(
        self,
        job_id: str,
        request: ApiRequest,
        prompts: Sequence[PromptTokens],
        *,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        arrived: float,
        keep: bool,
    ):
        """`arrived` is time.monotonic() when the request came; `keep`: deltas will be taken, not only the end."""
        self.id = job_id
        self.request = request
        self.prompts = prompts
        self.outputs: list[RequestOutput] = []  # one a prompt
        self.outcome = ""  # once ended: stop, length, aborted, rejected, timeout, error
        self._client, self._tokenizer, self._metrics = client, tokenizer, metrics
        self._arrived = arrived
        self._keep = keep
        self._streams: dict[str, tuple[int, ChoiceStream]] = {}  # core request -> (index of its prompt, its choice)
        self._choices: list[CompletionOutput] = []  # every candidate
        self._reasoning: dict[str, _Reasoning] = {}  # core request -> its reasoning, of models that think
        self._last: dict[str, float] = {}  # core request -> when its latest token came
        self._first: dict[str, float] = {}  # core request -> when its first tokens came
        self._pending: dict[int, Delta] = {}
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- to the engine

    def start(self, processor: InputProcessor, seconds: float | None) -> None:
        """Send the prompts; `seconds` from now the request times out. ApiError if a prompt cannot be served, and then
        nothing is sent."""
        params, request = self.request.params, self.request
        adds: list[tuple[Add, list[str]]] = []
        for number, prompt in enumerate(self.prompts):
            name = self.id if len(self.prompts) == 1 else f"{self.id}.{number}"
            try:
                prepared = processor.prepare(name, prompt.token_ids, params)
            except RequestError as error:
                text = str(error)
                if error.param == "speculative":  # the API's name of it
                    text = text.replace("draft_method", "speculative.method", 1)
                raise bad_request(text, error.param) from None
            output = RequestOutput(
                name, prompt.text, prompt.token_ids, [CompletionOutput(i) for i in range(params.num_choices)]
            )
            self.outputs.append(output)
            self._choices += output.outputs
            for index, each in enumerate(prepared.requests[: params.num_choices]):
                self._streams[each.id] = number, ChoiceStream(output, index, params, self._tokenizer, request.kept)
                if request.plan is not None and request.plan.thinks:
                    self._reasoning[each.id] = _Reasoning(request, self._tokenizer)
            add = Add(
                name, prompt.token_ids, params, request.priority, request.cache_salt, self._arrived, request.batch
            )
            adds.append((add, [each.id for each in prepared.requests[: params.num_choices]]))  # those that report
        try:
            for add, ids in adds:
                self._client.add(add, ids, self)
        except EngineGoneError as error:
            raise unavailable(str(error)) from None
        self._metrics.prompt_tokens.inc(sum(len(prompt.token_ids) for prompt in self.prompts))
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    def echo(self, processor: InputProcessor) -> None:
        """Instead of `start`: end at once, with no output. ApiError if a prompt holds ids that are no tokens."""
        for prompt in self.prompts:
            try:
                processor.tokens(prompt.token_ids)
            except RequestError as error:
                raise bad_request(str(error), "prompt") from None
            choices = [
                CompletionOutput(i, finish_reason=str(FinishReason.LENGTH)) for i in range(self.request.params.n)
            ]
            self.outputs.append(RequestOutput(self.id, prompt.text, prompt.token_ids, choices))
        self.outcome = str(FinishReason.LENGTH)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self._end("aborted", ClientGoneError())

    def cut(self, error: ApiError) -> None:
        """The server ends it."""
        self._end("error", error)

    def _expire(self, seconds: float) -> None:
        self._end("timeout", ApiError(504, f"the request was not finished within {seconds:g} s"))

    # -- from the engine

    def take(self, output: TokenOutput, queued: float | None) -> None:
        if queued is not None:
            self._metrics.queue.observe(queued)
        entry = self._streams.get(output.request_id)
        if entry is None or self.outcome:
            return
        number, stream = entry
        before = len(stream.choice.token_ids)
        try:
            updates = stream.add(output)
            if self._reasoning:
                self._reasoning[output.request_id].add(stream.choice.token_ids[before:])
        except Exception as error:
            self._end("error", ApiError(500, f"the answer could not be read: {type(error).__name__}: {error}"))
            raise
        self._time(output)
        choice = stream.choice
        if choice.finish_reason is not None:
            del self._streams[output.request_id]
            if len(choice.token_ids) > 1 and output.request_id in self._first:
                spent = self._last[output.request_id] - self._first[output.request_id]
                self._metrics.output_token.observe(spent / (len(choice.token_ids) - 1))
            if output.finish_reason is None:  # a stop string
                self._client.abort([output.request_id], FinishReason.STOP)
            if choice.finish_reason == FinishReason.ERROR:
                message = choice.error or "the engine could not go on with this request"
                self._end("error", ApiError(400 if message == NONE_ALLOWED else 500, message))
                return
        if self._keep:
            for update in updates:
                self._merge(number, update)
        if not self._streams:
            self._end(choice.finish_reason or "stop", None)
        elif self._pending:
            self._wake.set()

    def _time(self, output: TokenOutput) -> None:
        count = len(output.token_ids)
        if not count:
            return
        now = time.monotonic()
        last = self._last.get(output.request_id)
        if not self._last:
            self._metrics.first_token.observe(now - self._arrived)
        if last is None:
            self._first[output.request_id] = now
        else:
            each = (now - last) / count
            for _ in range(count):
                self._metrics.inter_token.observe(each)
        self._last[output.request_id] = now
        self._metrics.generated_tokens.inc(count)

    def _merge(self, number: int, update: Update) -> None:
        index = number * self.request.params.n + update.choice.index
        delta = self._pending.get(index)
        if delta is None:
            delta = self._pending[index] = Delta(index)
        if update.text:
            delta.texts.append(update.text)
        delta.token_ids += update.token_ids
        if update.logprobs is not None:
            delta.logprobs = (delta.logprobs or []) + update.logprobs
        delta.finish_reason = update.choice.finish_reason

    def refuse(self, message: str) -> None:
        self._end("rejected", bad_request(message))

    def lose(self, death: Death) -> None:
        self._end("error", ApiError(500, f"the engine died: {death.summary}", code="engine_died"))

    def _end(self, outcome: str, error: Exception | None) -> None:
        if self.outcome:
            return
        self.outcome, self._error = outcome, error
        if self._timer is not None:
            self._timer.cancel()
        if self._streams or error is not None:
            self._client.abort(list(self._streams))
            self._streams.clear()
        self._metrics.end_to_end.observe(time.monotonic() - self._arrived)
        self._wake.set()

    # -- to the writer

    async def deltas(self) -> list[Delta]:
        """What came since the last call, waiting for some; [] after all has been taken. Raises what ended the job:
        ApiError, or ClientGoneError after `abandon`."""
        while True:
            await self._wake.wait()
            if self._error is not None:
                raise self._error
            if self._pending:
                pending, self._pending = self._pending, {}
                if not self.outcome:
                    self._wake.clear()
                return [pending[index] for index in sorted(pending)]
            if self.outcome:
                return []
            self._wake.clear()

    async def finished(self) -> None:
        """Wait for the end; raises as `deltas` does."""
        while not self.outcome:
            await self._wake.wait()
            if not self.outcome:
                self._wake.clear()
        if self._error is not None:
            raise self._error

    async def settled(self, seconds: float) -> None:
        """Wait until something has come or the job has ended, at most so long; raises what ended it."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        if self._error is not None:
            raise self._error

    @property
    def completion_tokens(self) -> int:
        """Generated so far, for every candidate."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def reasoning_tokens(self) -> int:
        """Of them, those of reasoning."""
        return sum(reasoning.count for reasoning in self._reasoning.values())

    @property
    def cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs)
