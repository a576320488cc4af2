"""A body of OpenAI's chat or completions API as what the engine takes. Used by `headrace batch`.

Fields that cannot be honoured are refused, not dropped: an answer that silently ignores one is worse than none. Those
that only name the client or the account (`user`, `metadata` ...) change no answer and are let through.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import MOST_DRAFTS, PROPOSERS
from headrace.frontend.input import Prompt
from headrace.frontend.structured import FIELDS as FORM_FIELDS
from headrace.frontend.structured import FormError, grammar_of
from headrace.sampling.params import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETIONS)
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions

_HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options"}
_SAME_NAME = (
    "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "max_tokens",
    # beyond OpenAI's, under the names that vLLM gave them
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output", "bad_words", "allowed_token_ids", "beam_width", "length_penalty", "early_stopping",
)  # fmt: skip
_CHAT_ONLY = {
    "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "functions", "function_call", "modalities", "audio", "prediction", "reasoning_effort",
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
}  # fmt: skip
_COMPLETION_ONLY = {"prompt", "logprobs", "best_of", "echo", "suffix", "add_special_tokens"}
_INACTIVE: dict[str, tuple[Any, ...]] = {  # what cannot be honoured, and the values that ask for nothing
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "echo": (False,),
    "suffix": ("",),
}


class BodyError(ValueError):
    """A body that cannot be served; `param` names the field, if it is one's fault."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class BodyRequest:
    """A checked body. `messages` of a chat, or `prompts` of completions."""

    url: str
    model: str | None
    messages: Sequence[Mapping[str, Any]] | None
    prompts: Sequence[Prompt]
    params: SamplingParams
    template: Mapping[str, Any]  # keywords for the chat template
    add_special: bool
    stream: bool


def known_fields(url: str) -> set[str]:
    """Fields that a body sent to `url` may have."""
    own = _CHAT_ONLY if url == CHAT else _COMPLETION_ONLY
    return {"model", "stream", "speculative", *_SAME_NAME, *_HARMLESS, *FORM_FIELDS, *own}


def parse_body(url: str, body: Any, defaults: SamplingParams) -> BodyRequest:
    """Check a body sent to `url`, one of `URLS`; BodyError says what is wrong with it. `defaults` hold where the body
    says nothing; a null says nothing."""
    if not isinstance(body, Mapping):
        raise BodyError(f"the body must be an object, not {_kind(body)}")
    chat = url == CHAT
    known = known_fields(url)
    for name in body:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise BodyError(f"unknown field {name!r}{f'; did you mean {near[0]!r}?' if near else ''}", str(name))
    given = {name: value for name, value in body.items() if value is not None}
    for name, allowed in _INACTIVE.items():
        if name in given and given[name] not in allowed:
            raise BodyError(f"{name} is not supported yet; leave it out", name)
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise BodyError(f"model must be a string, not {_kind(model)}", "model")
    messages = _messages(given.get("messages")) if chat else None
    return BodyRequest(
        url=url,
        model=model,
        messages=messages,
        prompts=() if chat else _prompts(given.get("prompt")),
        params=_params(given, chat, defaults),
        template=_template(given) if chat else {},
        add_special=_flag(given, "add_special_tokens", True),
        stream=_flag(given, "stream", False),
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise BodyError(f"{name} must be true or false, not {_kind(value)}", name)
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BodyError("messages must be a list of at least one message", "messages")
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BodyError(f"{where} must be an object, not {_kind(message)}", "messages")
        if not isinstance(message.get("role"), str):
            raise BodyError(f"{where}.role must be a string, not {_kind(message.get('role'))}", "messages")
        messages.append({**message, "content": _content(message.get("content"), where)})
    return messages


def _content(value: Any, where: str) -> str | None:
    """Text, or text parts put together."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BodyError(f"{where}.content must be a string or a list of parts, not {_kind(value)}", "messages")
    texts = []
    for part in value:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BodyError(f"{where}.content: only parts of type text are supported", "messages")
        texts.append(part["text"])
    return "".join(texts)


def _prompts(value: Any) -> list[Prompt]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(each, str) or _is_ids(each) for each in value):
        return list(value)
    raise BodyError("prompt must be a string, a list of token ids, or a list of either", "prompt")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _template(given: Mapping[str, Any]) -> dict[str, Any]:
    extra = given.get("chat_template_kwargs", {})
    if not isinstance(extra, Mapping):
        raise BodyError(f"chat_template_kwargs must be an object, not {_kind(extra)}", "chat_template_kwargs")
    reserved = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"} & set(extra)
    if reserved:
        raise BodyError(f"chat_template_kwargs cannot hold {', '.join(sorted(reserved))}", "chat_template_kwargs")
    continued = _flag(given, "continue_final_message", False)
    return {
        **extra,
        "add_generation_prompt": _flag(given, "add_generation_prompt", not continued),
        "continue_final_message": continued,
    }


def _params(given: Mapping[str, Any], chat: bool, defaults: SamplingParams) -> SamplingParams:
    changes = {name: given[name] for name in _SAME_NAME if name in given}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if isinstance(changes.get(name), list):
            changes[name] = tuple(changes[name])
    if chat:
        if "max_completion_tokens" in given:
            changes["max_tokens"] = given["max_completion_tokens"]
        changes["logprobs"] = _chat_logprobs(given)
    else:
        changes.setdefault("max_tokens", COMPLETION_MAX_TOKENS)
        changes |= {name: given[name] for name in ("logprobs", "best_of") if name in given}
    if given.get("speculative") is not None:
        changes |= _speculative(given["speculative"])
    try:
        changes["grammar"] = grammar_of(given)
    except FormError as error:
        raise BodyError(str(error), error.param) from None
    try:
        return defaults.with_(**changes)
    except (ValueError, TypeError) as error:
        text = str(error)
        near = next((name for name in changes if text.startswith(name)), None)
        if chat and near == "logprobs":  # a number in completions only
            text, near = f"top_{text}", "top_logprobs"
        if near == "max_tokens" and "max_completion_tokens" in given:
            text, near = text.replace("max_tokens", "max_completion_tokens", 1), "max_completion_tokens"
        raise BodyError(text, near) from None


def _speculative(value: Any) -> dict[str, Any]:
    """The sampling options that `speculative` stands for: {"method": .., "num_tokens": .., "off": true}."""
    if not isinstance(value, dict):
        raise BodyError(f"speculative must be an object, not {_kind(value)}", "speculative")
    if unknown := sorted(map(str, value.keys() - {"method", "num_tokens", "off"})):
        raise BodyError(f"speculative has method, num_tokens and off, not {unknown[0]!r}", "speculative")
    changes: dict[str, Any] = {}
    if value.get("method") is not None:
        if value["method"] not in PROPOSERS:
            raise BodyError(f"speculative: method must be one of {', '.join(PROPOSERS)}", "speculative")
        changes["draft_method"] = value["method"]
    count = value.get("num_tokens")
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DRAFTS:
            raise BodyError(f"speculative: num_tokens must be an integer from 1 to {MOST_DRAFTS}", "speculative")
        changes["draft_tokens"] = count
    off = value.get("off")
    if off is not None and not isinstance(off, bool):
        raise BodyError(f"speculative: off must be true or false, not {_kind(off)}", "speculative")
    if off:
        changes["draft_tokens"] = 0
    return changes


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int)):
        raise BodyError(f"top_logprobs must be an integer, not {_kind(top)}", "top_logprobs")
    if not _flag(given, "logprobs", False):
        if top:
            raise BodyError("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    return top or 0
