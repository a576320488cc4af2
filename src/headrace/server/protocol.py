"""What the API adds to a body of completions or chat: the fields that concern the server, not the sampling.

`frontend/openai_request.py` checks the rest. Fields that nobody knows are left out and named in a header of the answer;
a field that is known and wrong is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.frontend.input import MAX_PRIORITY
from headrace.frontend.openai_request import CHAT, BodyError, BodyRequest, known_fields, parse_body
from headrace.sampling.params import SamplingParams
from headrace.server.errors import bad_request
from headrace.server.parsers.form import Plan
from headrace.server.parsers.tools import Tools, parse_tools

MAX_PROMPTS = 2048
MAX_SALT = 256  # characters
_CHAT_FIELDS = {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort"}
_SERVER_FIELDS = {
    "stream_options", "priority", "cache_salt", "timeout", "return_tokens_as_token_ids", "echo",
    "service_tier", *_CHAT_FIELDS,
}  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class ApiRequest:
    """A checked body."""

    body: BodyRequest
    ignored: tuple[str, ...]  # fields that nobody knows
    echo: bool  # completions: the prompt comes before the answer
    no_output: bool  # max_tokens 0: the prompt alone is asked for
    include_usage: bool  # of a stream: a last chunk with the usage
    priority: int
    cache_salt: str | None
    timeout: float | None  # seconds
    as_token_ids: bool  # in logprobs, tokens are named "token_id:N"
    batch: bool = False  # nobody waits for its tokens as they come
    caller: str | None = None  # where there are API keys: who sent it
    tools: Tools | None = None  # that may be called
    reasoning: bool = True  # is told, if there is any
    reasoning_effort: str | None = None
    plan: Plan | None = None  # of a chat: how its answers are read
    kept: frozenset[int] = frozenset()  # special tokens that whoever reads them must see

    @property
    def chat(self) -> bool:
        return self.body.url == CHAT

    @property
    def params(self) -> SamplingParams:
        return self.body.params


def parse_request(url: str, value: Mapping[str, Any], defaults: SamplingParams) -> ApiRequest:
    """Check a body sent to `url`; ApiError 400 names the field at fault."""
    chat = url == CHAT
    known = known_fields(url) | _SERVER_FIELDS - ({"echo"} if chat else _CHAT_FIELDS)
    ignored = tuple(str(name) for name in value if name not in known)
    rest = {name: each for name, each in value.items() if name in known and name not in _SERVER_FIELDS}
    given = {name: each for name, each in value.items() if name in _SERVER_FIELDS and each is not None}
    echo = not chat and _flag(given, "echo")
    no_output = not chat and type(rest.get("max_tokens")) is int and rest["max_tokens"] == 0
    if no_output:
        if not echo:
            raise bad_request("max_tokens 0 asks for the prompt alone and needs echo: true", "max_tokens")
        rest["max_tokens"] = 1  # the engine always makes one; it is not shown
        if rest.get("min_tokens") == 0:
            del rest["min_tokens"]
    try:
        body = parse_body(url, rest, defaults)
    except BodyError as error:
        raise bad_request(str(error), error.param) from None
    params = body.params
    if echo and params.logprobs is not None:
        body = _with_params(body, params.with_(prompt_logprobs=params.logprobs))
    tools = parse_tools(given) if chat else None
    if tools is not None and tools.forced and params.grammar is not None:
        raise bad_request("tool_choice that forces a call and a form of the answer exclude each other", "tool_choice")
    if len(body.prompts) > MAX_PROMPTS:
        raise bad_request(f"prompt holds {len(body.prompts)} prompts; at most {MAX_PROMPTS} are taken", "prompt")
    include_usage = _stream_options(given, body.stream)
    return ApiRequest(
        body=body,
        ignored=ignored,
        echo=echo,
        no_output=no_output,
        include_usage=include_usage,
        priority=_integer(given, "priority", -MAX_PRIORITY, MAX_PRIORITY),
        cache_salt=_salt(given),
        timeout=_timeout(given),
        as_token_ids=_flag(given, "return_tokens_as_token_ids"),
        batch=_tier(given) == "flex",
        tools=tools,
        reasoning=_flag(given, "include_reasoning", True),
        reasoning_effort=_effort(given),
    )


def _with_params(body: BodyRequest, params: SamplingParams) -> BodyRequest:
    return replace(body, params=params)


def _flag(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false", name)
    return value


def _effort(given: Mapping[str, Any]) -> str | None:
    value = given.get("reasoning_effort")
    if value is not None and value not in EFFORTS:
        raise bad_request(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    return value


def _integer(given: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = given.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_request(f"{name} must be an integer between {low} and {high}", name)
    return value


def _stream_options(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
    if not stream:
        raise bad_request("stream_options is for streams only; leave it out or set stream: true", "stream_options")
    value = options.get("include_usage")
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_request("stream_options.include_usage must be true or false", "stream_options")
    return value


def _salt(given: Mapping[str, Any]) -> str | None:
    """ "" is no salt."""
    value = given.get("cache_salt")
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > MAX_SALT:
        raise bad_request(f"cache_salt must be a string of at most {MAX_SALT} characters", "cache_salt")
    return value


def _tier(given: Mapping[str, Any]) -> str:
    """OpenAI's name for batch work is flex; all others are for requests that somebody waits for."""
    value = given.get("service_tier", "auto")
    if not isinstance(value, str):
        raise bad_request("service_tier must be a string: flex for batch work, or auto", "service_tier")
    return value


def _timeout(given: Mapping[str, Any]) -> float | None:
    value = given.get("timeout")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400 * 365:
        raise bad_request("timeout must be a number of seconds above 0", "timeout")
    return float(value)
