"""LLM: the offline interface. Many prompts at once through continuous batching, or one as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from headrace.config import EngineArgs
from headrace.core.request import RequestError
from headrace.frontend.engine import Engine
from headrace.frontend.input import Prompt
from headrace.frontend.output import RequestOutput, Update
from headrace.frontend.progress import progress_bar
from headrace.ledger.bill import Bill
from headrace.ledger.explain import summarize
from headrace.sampling.params import SamplingParams

Message = dict[str, Any]


class LLM:
    """A model, ready to generate.

    `model` is a name, a GGUF file, a folder or a hub id; None is the default model, fetched at first use. Further
    keywords are the fields of `EngineArgs`; an unknown one raises TypeError.
    """

    def __init__(self, model: str | None = None, **options: Any):
        self.engine = Engine(EngineArgs.make(model=model, **options))

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLM:
        """From options already checked."""
        llm = cls.__new__(cls)
        llm.engine = Engine(args)
        return llm

    @property
    def default_params(self) -> SamplingParams:
        """Used where no parameters are given: what the model's authors recommend."""
        return self.engine.default_params

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
        batch: list[Prompt] = [prompts] if _is_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        if params is None or isinstance(params, SamplingParams):
            each: list[SamplingParams | None] = [params] * len(batch)
        else:
            each = list(params)
            if len(each) != len(batch):
                raise RequestError(f"{len(batch)} prompts, but {len(each)} sampling parameters: give one, or one each")
        outputs: list[RequestOutput] = []
        try:
            for index, (prompt, one) in enumerate(zip(batch, each, strict=True)):
                try:
                    outputs.append(self.engine.submit(prompt, one, add_special=add_special))
                except RequestError as error:
                    raise RequestError(f"prompt {index}: {error}") from None if len(batch) > 1 else error
            self._finish(outputs, progress)
        except BaseException:  # a refused prompt, Ctrl-C: nothing may go on in the background
            for output in outputs:
                self.engine.abort(output)
            raise
        return outputs

    def _finish(self, outputs: list[RequestOutput], progress: bool) -> None:
        """Step until all have ended."""
        running = {id(output) for output in outputs}
        num_tokens = 0
        with progress_bar("prompts", show=progress) as bar:
            while running:
                for update in self.engine.step():
                    num_tokens += len(update.token_ids)
                    if update.output.finished:
                        running.discard(id(update.output))
                bar.show(len(outputs) - len(running), len(outputs), num_tokens)

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
        output = self.engine.submit(prompt, params, add_special=add_special)
        try:
            while not output.finished:
                yield from (update for update in self.engine.step() if update.output is output)
        finally:
            self.engine.abort(output)

    def explain(self) -> str:
        """Where the time of the steps so far went, and what bound them."""
        return summarize(self.engine.ledger)

    def bill(self, output: RequestOutput) -> Bill | None:
        """Where a prompt's time went: items that sum to its wall time. None where no ledger is kept, or no longer."""
        return self.engine.bill(output.request_id)

    def close(self) -> None:
        """End what runs and free the model."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


def _is_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
