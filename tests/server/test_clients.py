"""Stock clients against a real server with the default model: openai, langchain-openai, anthropic."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from harness import Server, serve_command

pytestmark = pytest.mark.slow

TEMPLATE = """{%- if tools %}<|im_start|>system
You call functions. Functions: {{ tools | tojson }}
Answer with <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION = "What is the capital of France? Answer in one word."
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def real(default_model_path, tmp_path_factory):
    """The default model with a template that knows tools."""
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(TEMPLATE)
    options = ("--served-model-name", "smol", "--chat-template", str(template))
    environment = {"HEADRACE_NATIVE": "1", "HEADRACE_CHECK": "0"}
    with Server(serve_command(default_model_path, *options), environment) as running:
        yield running


# -- openai


@pytest.fixture(scope="module")
def client(real):
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}]


def test_openai_chat_and_completions(client):
    fields = {"model": "smol", "messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    assert "Paris" in whole.choices[0].message.content and whole.choices[0].finish_reason == "stop"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content
    text = client.completions.create(
        model="smol",
        prompt=["The capital of France is", "1, 2, 3,"],
        max_tokens=8,
        temperature=0,
        echo=True,
        logprobs=1,
    )
    assert "Paris" in text.choices[0].text and text.choices[1].text.startswith("1, 2, 3, 4")
    assert text.choices[0].logprobs.token_logprobs[0] is None


def test_openai_tools(client):
    fields = {"model": "smol", "messages": [{"role": "user", "content": "The weather in Rome?"}], "tools": TOOLS}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        message = client.chat.completions.create(
            **fields, tool_choice=choice, parallel_tool_calls=False, temperature=0, max_tokens=60
        ).choices[0].message  # fmt: skip
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    back = [*fields["messages"], message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees"}]
    answer = client.chat.completions.create(model="smol", messages=back, temperature=0, max_tokens=30)
    assert answer.choices[0].message.content


def test_openai_structured(client):
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: str
        inhabitants: int

    fields = {"model": "smol", "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    parsed = client.chat.completions.parse(**fields, response_format=Answer).choices[0].message.parsed
    assert isinstance(parsed, Answer)
    same = client.responses.parse(
        model="smol", input=QUESTION, text_format=Answer, temperature=0, max_output_tokens=200
    )
    assert isinstance(same.output_parsed, Answer)


def test_openai_responses(client):
    first = client.responses.create(model="smol", input=QUESTION, temperature=0, max_output_tokens=40)
    assert "Paris" in first.output_text and first.status == "completed"
    second = client.responses.create(
        model="smol", input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=40
    )
    assert second.usage.input_tokens > first.usage.input_tokens and second.output_text
    tool = {"type": "function", "name": "weather", "parameters": CITY}
    fields = {"model": "smol", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**fields, input="The weather in Rome?", temperature=0) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    said = [{"role": "user", "content": "The weather in Rome?"}, call.model_dump(exclude_none=True), output]
    assert client.responses.create(model="smol", input=said, temperature=0, max_output_tokens=30).output_text


# -- anthropic


def test_anthropic(real):
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0) as client:
        fields = {"model": "smol", "max_tokens": 40, "messages": MESSAGES, "extra_body": {"temperature": 0}}
        answer = client.messages.create(**fields, system="You know the world.")
        assert "Paris" in answer.content[0].text and answer.stop_reason == "end_turn"
        with client.messages.stream(**fields, system="You know the world.") as stream:
            assert "".join(stream.text_stream) == answer.content[0].text
        tool = {"name": "weather", "input_schema": CITY}
        asked = [{"role": "user", "content": "The weather in Rome?"}]
        called = client.messages.create(
            **{**fields, "messages": asked, "max_tokens": 80}, tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )  # fmt: skip
        assert called.stop_reason == "tool_use" and called.content[-1].input["city"] in ("Paris", "Rome")
        result = {"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "Sunny"}
        back = [*asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**{**fields, "messages": back}, tools=[tool]).usage.output_tokens
        assert client.messages.count_tokens(model="smol", messages=MESSAGES).input_tokens > 10


# -- langchain-openai


def test_langchain(real):
    chat_models = pytest.importorskip("langchain_openai")
    from pydantic import BaseModel, Field

    class Answer(BaseModel):
        """The answer."""

        city: str = Field(description="name of the city")

    fields = {"base_url": f"{real.url}/v1", "api_key": "none", "model": "smol", "temperature": 0, "max_retries": 0}
    model = chat_models.ChatOpenAI(**fields, max_tokens=100)
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.content and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == answer.content
    assert [each.content for each in model.batch([QUESTION] * 3)] == [answer.content] * 3
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Answer, method=method).invoke(QUESTION), Answer), method
    called = model.bind_tools([Answer], tool_choice="any").invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "Answer" and set(called.tool_calls[0]["args"]) == {"city"}
    text = chat_models.OpenAI(**fields, max_tokens=8).invoke("The capital of France is")
    assert "Paris" in text
    responses = chat_models.ChatOpenAI(**fields, max_tokens=40, use_responses_api=True).invoke(QUESTION)
    assert "Paris" in responses.text
