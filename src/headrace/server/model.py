"""The model as the API process knows it: names, text and templates, no weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headrace.config import EngineArgs
from headrace.core.request import RequestError
from headrace.frontend.chat import ChatTemplate, ChatTemplateError
from headrace.frontend.defaults import recommended_params
from headrace.frontend.input import Prompt
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.store import resolve_model
from headrace.server.errors import ApiError, bad_request
from headrace.server.job import PromptTokens
from headrace.server.parsers.form import AnswerForm

SHORT = 8192  # characters or bytes: what is longer is tokenised and rendered in a thread
_THREADS = 2
T = TypeVar("T")


class ModelText:
    """Names, tokenizer, chat template and recommended sampling of the served model."""

    def __init__(self, args: EngineArgs, names: Sequence[str] = (), template: str | None = None):
        """Raises what loading a model raises, ChatTemplateError never: a template is compiled when first used."""
        checkpoint = open_checkpoint(resolve_model(args.model))
        self.spec = checkpoint.spec
        self.tokenizer = checkpoint.tokenizer()
        self.template = ChatTemplate.of(self.tokenizer, template)
        self.form = AnswerForm(self.template.sources, self.tokenizer)
        self.defaults = recommended_params(checkpoint)
        own = dict.fromkeys(name for name in (args.model, checkpoint.name) if name)
        self.names: tuple[str, ...] = tuple(names) or tuple(own)
        self.created = int(time.time())
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="headrace-text")

    def check_name(self, name: str | None) -> str:
        """The name to answer with; ApiError 404 for a model that is not served. None is the served one."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here; this is {served}", param="model",
                code="model_not_found",
            )  # fmt: skip
        return name

    async def render(
        self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any], size: int
    ) -> PromptTokens:
        """A chat as tokens; `size` is that of the body it came in. ApiError 400 with the template's own words."""

        def work() -> PromptTokens:
            text = self.template.render(messages, **template)
            return PromptTokens(None, self.tokenizer.encode(text, add_special=False), text)

        return await self._do(work, size, "messages")

    async def tokens(self, prompts: Sequence[Prompt], add_special: bool) -> list[PromptTokens]:
        """Prompts as tokens; ids are passed on unchecked."""

        def work() -> list[PromptTokens]:
            return [
                PromptTokens(prompt, self.tokenizer.encode(prompt, add_special=add_special))
                if isinstance(prompt, str)
                else PromptTokens(None, list(prompt))
                for prompt in prompts
            ]

        return await self._do(work, sum(len(prompt) for prompt in prompts), "prompt")

    async def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        return await self._do(lambda: self.tokenizer.decode(token_ids, skip_special), len(token_ids), "tokens")

    async def _do(self, work: Callable[[], T], size: int, param: str) -> T:
        try:
            if size <= SHORT:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except (ChatTemplateError, RequestError, ValueError) as error:
            raise bad_request(str(error), param) from None
        except TypeError as error:  # chat_template_kwargs that are no arguments
            raise bad_request(f"the chat template cannot be called so: {error}", "chat_template_kwargs") from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
