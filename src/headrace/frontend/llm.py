"""LLM: the offline interface. Many prompts at once through continuous batching, or one as a stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from types import TracebackType
from typing import Any

import numpy as np

from headrace.config import EngineArgs
from headrace.core.request import RequestError
from headrace.frontend.engine import Engine
from headrace.frontend.input import Prompt
from headrace.frontend.interrupts import HeldInterrupts
from headrace.frontend.output import RequestOutput, Update
from headrace.frontend.progress import progress_bar
from headrace.ledger.bill import Bill
from headrace.sampling.params import SamplingParams

Message = dict[str, Any]


class LLM:
    """A model, ready to generate. Several threads may use it at once, and several streams may be read in turns: one
    steps the engine at a time, and each gets what is its own.

    `model` is a name, a GGUF file, a folder or a hub id; None is the default model, fetched at first use. Further
    keywords are the fields of `EngineArgs`; an unknown one raises TypeError.
    """

    def __init__(self, model: str | None = None, **options: Any):
        self._start(EngineArgs.make(model=model, **options))

    def _start(self, args: EngineArgs, chat: bool = True) -> None:
        self.engine = Engine(args, chat=chat)
        self._lock = threading.RLock()
        self._inboxes: dict[int, deque[Update]] = {}  # updates of the streams being read, by id of their output

    @classmethod
    def from_args(cls, args: EngineArgs, *, chat: bool = True) -> LLM:
        """From options already checked. Not `chat`: see Engine."""
        llm = cls.__new__(cls)
        llm._start(args, chat)
        return llm

    @property
    def default_params(self) -> SamplingParams:
        """Used where no parameters are given: what the model's authors recommend."""
        return self.engine.default_params

    def profile(self, folder: str | PathLike[str]) -> AbstractContextManager[list[str]]:
        """For a `with` block: profile what happens inside it and leave traces and the steps' records in `folder`; the
        list it gives then has a summary's lines. See `headrace profile`."""
        from headrace.frontend.profiling import profiled

        return profiled(self.engine, folder)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special: bool = True,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids), all at once; outputs come in the order of the prompts.

        `params` is one for all or one for each. A prompt that cannot be served raises RequestError before anything
        is generated. `progress` shows a bar on stderr.
        """
        batch = _prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each: list[SamplingParams | None] = [params] * len(batch)
        elif isinstance(params, Sequence) and not isinstance(params, str):
            each = list(params)
            if len(each) != len(batch):
                raise RequestError(f"{len(batch)} prompts, but {len(each)} sampling parameters: give one, or one each")
        else:
            raise RequestError(f"params must be SamplingParams, or one for each prompt, not {type(params).__name__}")
        outputs: list[RequestOutput] = []
        with HeldInterrupts() as held:
            try:
                for index, (prompt, one) in enumerate(zip(batch, each, strict=True)):
                    try:
                        with self._lock:
                            outputs.append(self.engine.submit(prompt, one, add_special=add_special, live=False))
                    except RequestError as error:
                        if len(batch) == 1:
                            raise
                        raise RequestError(f"prompt {index}: {error}") from None
                    held.let_through()
                self._finish(outputs, progress, held)
            except BaseException:  # a refused prompt, Ctrl-C: nothing may go on in the background
                with self._lock:
                    for output in outputs:
                        self.engine.abort(output)
                raise
        return outputs

    def _finish(self, outputs: list[RequestOutput], progress: bool, held: HeldInterrupts) -> None:
        """Step until all have ended, or Ctrl-C came."""
        waiting = deque(outputs)
        with progress_bar("prompts", show=progress) as bar:
            while waiting:
                if waiting[0].finished:
                    waiting.popleft()
                    continue
                self._step(waiting[0])
                held.let_through()
                if progress:
                    done = sum(output.finished for output in outputs)
                    with self._lock:
                        num_tokens = self.engine.num_tokens(outputs)
                    bar.show(done, len(outputs), num_tokens)

    def _step(self, wanted: RequestOutput) -> None:
        """One step of the engine, unless `wanted` has ended meanwhile; every stream gets its updates."""
        with self._lock:
            if wanted.finished or self._inboxes.get(id(wanted)):
                return
            if self.engine.closed:
                raise RequestError("the engine was closed before this request had ended")
            for update in self.engine.step():
                if id(update.output) in self._inboxes:
                    self._inboxes[id(update.output)].append(update)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, rendered with the model's chat template. Further keywords go
        to the template (`tools`, `add_generation_prompt`, `continue_final_message` ...)."""
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else list(messages)
        prompts = [self.render(conversation, **template) for conversation in conversations]
        return self.generate(prompts, params)

    def render(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        return self.engine.render(messages, **template)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, add_special: bool = True
    ) -> Iterator[Update]:
        """Complete one prompt, an update a step. Leaving the loop early ends the request."""
        inbox: deque[Update] = deque()
        with self._lock, HeldInterrupts():
            output = self.engine.submit(prompt, params, add_special=add_special)
            self._inboxes[id(output)] = inbox
        try:
            while inbox or not output.finished:
                with HeldInterrupts():
                    self._step(output)
                while inbox:
                    yield inbox.popleft()
        finally:
            with self._lock, HeldInterrupts():
                del self._inboxes[id(output)]
                self.engine.abort(output)

    def explain(self) -> str:
        """Where the time of the steps so far went, and what bound them."""
        from headrace.ledger.explain import summarize

        return summarize(self.engine.ledger)

    def bill(self, output: RequestOutput) -> Bill | None:
        """Where a prompt's time went: items that sum to its wall time. None where no ledger is kept, or no longer."""
        return self.engine.bill(output.request_id)

    def close(self) -> None:
        """End what runs and free the model. Calling it again does nothing."""
        with self._lock:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


def _prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        kind = type(prompts).__name__
        raise RequestError(f"a prompt is a text or a list of token ids, and prompts are a list of those, not {kind}")
    if prompts and isinstance(prompts[0], (int, np.integer)):
        return [prompts]
    return list(prompts)
