"""Schemas of what is sent to the routes that generate."""

from __future__ import annotations

from headrace.config import MOST_DRAFTS, PROPOSERS
from headrace.frontend.input import MAX_PRIORITY
from headrace.sampling.params import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKEN_ID,
)
from headrace.server.openapi.parts import (
    BOOLEAN,
    OBJECT,
    STRING,
    Schema,
    any_of,
    integer,
    listed,
    number,
    one_of,
    record,
    string,
)
from headrace.server.parsers.tools import MAX_TOOLS
from headrace.server.protocol import EFFORTS, MAX_PROMPTS, MAX_SALT

_LARGE = 2**31 - 1
_TOKEN = integer(0, MAX_TOKEN_ID)
_STOP = string(1, MAX_STOP_LENGTH)
_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": number(-100, 100),
}
_SAMPLING: dict[str, Schema] = {
    "temperature": number(0, 1e6),
    "top_p": number(0, 1, low_open=True),
    "top_k": integer(-1, _LARGE),
    "min_p": number(0, 1),
    "seed": integer(-(2**63), 2**63 - 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 100),
    "logit_bias": _BIAS,
    "ignore_eos": BOOLEAN,
    "priority": integer(-MAX_PRIORITY, MAX_PRIORITY),
    "cache_salt": string(0, MAX_SALT),
    "timeout": number(0, 86400 * 365, low_open=True),
    "min_tokens": integer(0, _LARGE),
}
_PLAIN_FORM = record({"type": one_of("text", "json_object")})
_SCHEMA_FORM = record({"type": one_of("json_schema"), "json_schema": record({"schema": any_of(OBJECT, one_of(True))})})
_MORE: dict[str, Schema] = {
    "n": integer(1, MAX_CHOICES),
    "stop": any_of(_STOP, listed(_STOP, most=MAX_STOPS)),
    "stop_token_ids": listed(_TOKEN),
    "bad_words": any_of(string(1, MAX_BAD_WORD_LENGTH), listed(string(1, MAX_BAD_WORD_LENGTH), most=MAX_BAD_WORDS)),
    "allowed_token_ids": listed(_TOKEN, least=1),
    "skip_special_tokens": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "beam_width": integer(1, MAX_CHOICES),
    "length_penalty": number(-10, 10),
    "early_stopping": BOOLEAN,
    "speculative": record({}, {"method": one_of(*PROPOSERS), "num_tokens": integer(1, MOST_DRAFTS), "off": BOOLEAN}),
    "return_tokens_as_token_ids": BOOLEAN,
    "response_format": any_of(_PLAIN_FORM, _SCHEMA_FORM),
    "structured_outputs": OBJECT,
    "guided_regex": string(1),
    "guided_choice": listed(string(1), least=1),
    "guided_grammar": string(1),
    "stream": BOOLEAN,
    "stream_options": record({}, {"include_usage": BOOLEAN}),
    "user": {},
    "metadata": {},
}


def _text_parts(*kinds: str) -> Schema:
    return listed(record({"type": one_of(*kinds), "text": STRING}))


def completions(model: Schema) -> Schema:
    prompt = any_of(
        string(1), listed(_TOKEN, least=1), listed(string(1), 1, MAX_PROMPTS),
        listed(listed(_TOKEN, least=1), 1, MAX_PROMPTS),
    )  # fmt: skip
    optional = {
        "model": model,
        **_SAMPLING,
        **_MORE,
        "max_tokens": integer(0, _LARGE),
        "best_of": integer(1, MAX_CHOICES),
        "logprobs": integer(0, MAX_LOGPROBS),
        "echo": BOOLEAN,
        "suffix": one_of(""),
        "add_special_tokens": BOOLEAN,
    }
    return record({"prompt": prompt}, optional)


def chat(model: Schema) -> Schema:
    message = record(
        {"role": STRING},
        {"content": any_of(STRING, _text_parts("text")), "tool_calls": listed(OBJECT), "reasoning_content": STRING},
    )
    function = record({"name": _NAME}, {"description": STRING, "parameters": OBJECT, "strict": BOOLEAN})
    named = record({"type": one_of("function"), "function": record({"name": STRING})})
    optional = {
        "model": model,
        **_SAMPLING,
        **_MORE,
        "max_tokens": integer(1, _LARGE),
        "max_completion_tokens": integer(1, _LARGE),
        "logprobs": BOOLEAN,
        "top_logprobs": integer(0, MAX_LOGPROBS),
        "tools": listed(record({"type": one_of("function"), "function": function}), most=MAX_TOOLS),
        "tool_choice": any_of(one_of("none", "auto", "required"), named),
        "parallel_tool_calls": BOOLEAN,
        "reasoning_effort": one_of(*EFFORTS),
        "include_reasoning": BOOLEAN,
        "chat_template_kwargs": OBJECT,
        "add_generation_prompt": BOOLEAN,
        "continue_final_message": BOOLEAN,
    }
    return record({"messages": listed(message, least=1)}, optional)


def responses(model: Schema) -> Schema:
    content = any_of(STRING, _text_parts("input_text", "output_text", "text"))
    message = record({"role": one_of("user", "assistant", "system", "developer"), "content": content})
    message["properties"]["type"] = one_of("message")
    call = record({"type": one_of("function_call"), "call_id": STRING, "name": STRING, "arguments": STRING})
    output = record({"type": one_of("function_call_output"), "call_id": STRING, "output": content})
    reasoning = record(
        {"type": one_of("reasoning")},
        {"summary": _text_parts("summary_text"), "content": _text_parts("reasoning_text")},
    )
    tool = record({"type": one_of("function"), "name": _NAME}, {"description": STRING, "parameters": OBJECT})
    schema_form = record({"type": one_of("json_schema"), "schema": any_of(OBJECT, one_of(True))}, {"name": STRING})
    optional = {
        "model": model,
        **_SAMPLING,
        "instructions": STRING,
        "max_output_tokens": integer(1, _LARGE),
        "top_logprobs": integer(0, MAX_LOGPROBS),
        "include": listed(STRING),
        "tools": listed(tool, most=MAX_TOOLS),
        "tool_choice": any_of(one_of("none", "auto", "required"), record({"type": one_of("function"), "name": STRING})),
        "parallel_tool_calls": BOOLEAN,
        "text": record({}, {"format": any_of(_PLAIN_FORM, schema_form)}),
        "reasoning": record({}, {"effort": one_of(*EFFORTS)}),
        "previous_response_id": STRING,
        "store": BOOLEAN,
        "stream": BOOLEAN,
        "truncation": one_of("disabled"),
        "background": one_of(False),
    }
    return record({"input": any_of(STRING, listed(any_of(message, call, output, reasoning), least=1))}, optional)


def messages(model: Schema, *, counting: bool = False) -> Schema:
    texts = _text_parts("text")
    blocks = any_of(
        record({"type": one_of("text"), "text": STRING}),
        record({"type": one_of("thinking"), "thinking": STRING}),
        record({"type": one_of("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}),
    )
    user_blocks = any_of(
        record({"type": one_of("text"), "text": STRING}),
        record({"type": one_of("tool_result"), "tool_use_id": STRING}, {"content": any_of(STRING, texts)}),
    )
    message = any_of(
        record({"role": one_of("user", "system"), "content": any_of(STRING, listed(user_blocks))}),
        record({"role": one_of("assistant"), "content": any_of(STRING, listed(blocks))}),
    )
    choice = any_of(
        record({"type": one_of("auto", "any", "none")}, {"disable_parallel_tool_use": BOOLEAN}),
        record({"type": one_of("tool"), "name": STRING}, {"disable_parallel_tool_use": BOOLEAN}),
    )
    optional = {
        "model": model,
        **_SAMPLING,
        "system": any_of(STRING, texts),
        "stop_sequences": listed(_STOP, most=MAX_STOPS),
        "tools": listed(record({"name": _NAME}, {"description": STRING, "input_schema": OBJECT}), most=MAX_TOOLS),
        "tool_choice": choice,
        "thinking": record({"type": one_of("enabled", "disabled", "adaptive")}),
        "chat_template_kwargs": OBJECT,
        "stream": BOOLEAN,
    }
    required = {"messages": listed(message, least=1)}
    if counting:
        return record(required, {**optional, "max_tokens": integer(1, _LARGE)})
    return record({**required, "max_tokens": integer(1, _LARGE)}, optional)


def tokenize(model: Schema) -> Schema:
    message = record({"role": STRING}, {"content": any_of(STRING, _text_parts("text"))})
    text = record({"prompt": STRING}, {"model": model, "add_special_tokens": BOOLEAN, "return_token_strs": BOOLEAN})
    flags = ("add_generation_prompt", "continue_final_message", "return_token_strs")
    chats = record({"messages": listed(message, least=1)}, {"model": model, **dict.fromkeys(flags, BOOLEAN)})
    return any_of(text, chats)


def detokenize(model: Schema) -> Schema:
    flag = {"skip_special_tokens": BOOLEAN}
    found = record({"tokens": listed(_TOKEN)}, {"model": model})
    found["properties"] |= flag
    return found
