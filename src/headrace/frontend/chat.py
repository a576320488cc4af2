"""ChatTemplate: messages to the prompt a model was trained on, by the jinja2 template that comes with the model.

Same text as transformers' `apply_chat_template(tokenize=False)`. Encode it with `add_special=False`: a template that
wants a beginning-of-sequence token prints it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

    from headrace.frontend.tokenizer import Tokenizer

MAX_TEMPLATE = 1 << 20  # characters of a template's source


class ChatTemplateError(ValueError):
    """The messages cannot be rendered; the message is the template's own where it raised one."""


class ChatTemplate:
    """A compiled chat template. `source` None stands for a model that has none: rendering says so.

    `tool_source` is used instead where tools are given, `special_tokens` are variables (bos_token, eos_token ...).
    """

    def __init__(
        self,
        source: str | None,
        *,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        self.source = source
        self._tool_source = tool_source
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, Template] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """The tokenizer's own template, or `source` in its place."""
        templates = tokenizer.chat_templates
        own = source is None
        return cls(
            templates.get("default") if own else source,
            tool_source=templates.get("tool_use") if own else None,
            special_tokens=tokenizer.special_tokens,
        )

    @property
    def sources(self) -> str:
        """All that this model's templates say, "" if it has none."""
        return "\n".join(source for source in (self.source, self._tool_source) if source is not None)

    def prepared(self) -> ChatTemplate:
        """Itself, compiled now, so that the first conversation need not wait; that one is told what is wrong."""
        with contextlib.suppress(ChatTemplateError):
            self._template(False)
        return self

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt. Raises ChatTemplateError.

        `continue_final_message` ends the prompt inside the last message, which must be the assistant's, so that the
        model goes on writing it; it excludes `add_generation_prompt`. `variables` reach the template as they are
        (enable_thinking ...).
        """
        if not messages:
            raise ChatTemplateError("messages is empty; give at least one message")
        try:
            chat = [_plain_message(message) for message in messages]
            given = _plain({**variables, "tools": tools, "documents": documents})
        except RecursionError:
            raise ChatTemplateError("what the chat template is given is nested too deeply") from None
        tag = ""
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
            tag = _tag_final(chat)
        text = self._run(
            self._template(bool(tools)),
            {
                **self._special_tokens,
                **given,
                "messages": chat,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut(text, tag) if tag else text

    def _template(self, with_tools: bool) -> Template:
        source = self._tool_source if with_tools and self._tool_source is not None else self.source
        if source is None:
            raise ChatTemplateError(
                "this model has no chat template; use completions instead of chat, or give a chat template"
            )
        if len(source) > MAX_TEMPLATE:
            raise ChatTemplateError(f"the chat template has {len(source)} characters; {MAX_TEMPLATE} are allowed")
        if source not in self._compiled:
            from jinja2.exceptions import TemplateError, TemplateSyntaxError

            from headrace.frontend.template_sandbox import TemplateEnvironment

            try:
                self._compiled[source] = TemplateEnvironment().from_string(source)
            except TemplateSyntaxError as error:
                raise ChatTemplateError(f"the chat template is wrong at line {error.lineno}: {error.message}") from None
            except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
                raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from None
        return self._compiled[source]

    def _run(self, template: Template, variables: dict[str, Any]) -> str:
        from jinja2.exceptions import TemplateError

        from headrace.frontend.template_sandbox import BUDGET, Budget

        budget = Budget()
        token = BUDGET.set(budget)
        pieces: list[str] = []
        try:
            for piece in template.generate(variables):
                budget.spend(len(piece))
                pieces.append(piece)
        except TemplateError as error:
            raise ChatTemplateError(error.message or "the chat template refused these messages") from None
        except RecursionError:
            raise ChatTemplateError("the chat template calls itself without end") from None
        except Exception as error:  # a template is a program: it can raise anything
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from None
        finally:
            BUDGET.reset(token)
        return "".join(pieces)


def _plain(value: Any) -> Any:
    """JSON-like data only: objects with methods of their own must not reach a template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise ChatTemplateError(f"a chat template takes JSON values, not {type(value).__name__}")


def _plain_message(message: Any) -> dict[str, Any]:
    """A copy without the keys that are None: clients send content=None, templates would print "None"."""
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"each message must be an object with role and content, not {type(message).__name__}")
    return {key: value for key, value in _plain(message).items() if value is not None}


def _tag_final(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text. The tag ends with a space, to see whether the template trims it."""
    last = chat[-1]
    if last.get("role") != "assistant":
        raise ChatTemplateError("continue_final_message needs a last message of role assistant")
    tag = f"CONTINUE-{secrets.token_hex(8)} "
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + tag
        return tag
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += tag
                return tag
    raise ChatTemplateError("continue_final_message needs text in the last message")


def _cut(text: str, tag: str) -> str:
    """The prompt up to the tag; trailing spaces of the message go where the template would have trimmed them."""
    end = text.rfind(tag.rstrip())
    if end < 0:
        raise ChatTemplateError("the chat template drops the last message, so it cannot be continued")
    return text[:end] if text.startswith(tag, end) else text[:end].rstrip()
