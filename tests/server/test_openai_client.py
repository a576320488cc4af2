"""OpenAI's own client against a real server."""

from __future__ import annotations

import openai
import pytest


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=2, n=2
    )
    assert len(answer.choices) == 2 and answer.usage.completion_tokens == 12
    assert len(answer.choices[0].logprobs.content) == 6
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_streamed_chat(client):
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_the_stream_helper(client):
    fields = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 40,
        "stop": ["a"],
        "logit_bias": {"64": 5},
        "seed": 1,
    }
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == client.chat.completions.create(**fields).choices[0].message.content


def test_completions(client):
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=3, logprobs=2, echo=True, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.token_logprobs) == 4
    text = "".join(c.choices[0].text for c in client.completions.create(model="tiny", prompt="a", stream=True))
    assert isinstance(text, str)


def test_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a" * 600)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


def test_an_error_within_a_stream(slow):
    with (
        openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError, match="the scripted error"),
    ):
        list(client.completions.create(model=client.models.list().data[0].id, prompt="Eh", max_tokens=50, stream=True))


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.anyio
async def test_many_at_once(server):
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        seeds = [0, 1, 2, 3] * 6
        answers = await asyncio.gather(
            *(client.completions.create(model="tiny", prompt="a", seed=seed, max_tokens=10) for seed in seeds)
        )
    texts = [answer.choices[0].text for answer in answers]
    assert texts == texts[:4] * 6


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
