"""A job whose reader is slow: what waits is merged, nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from headrace.config import EngineArgs
from headrace.core.plan import Logprob
from headrace.core.request import FinishReason, TokenOutput
from headrace.frontend.input import InputProcessor
from headrace.frontend.openai_request import COMPLETIONS
from headrace.server.errors import ApiError
from headrace.server.job import Job, PromptTokens
from headrace.server.metrics import Metrics
from headrace.server.model import ModelText
from headrace.server.protocol import parse_request


class FakeClient:
    def __init__(self) -> None:
        self.added: list[str] = []
        self.aborted: list[str] = []

    def add(self, prompt, request_ids, sink) -> None:
        self.added += request_ids

    def abort(self, request_ids, reason=FinishReason.ABORT) -> None:
        self.aborted += request_ids


@pytest.fixture(scope="module")
def model(tiny_model) -> ModelText:
    return ModelText(EngineArgs(model=str(tiny_model)))


def start(model: ModelText, *, prompts: int = 1, keep: bool = True, **fields) -> tuple[Job, FakeClient]:
    request = parse_request(COMPLETIONS, {"prompt": ["ab"] * prompts, "stream": True, **fields}, model.defaults)
    client = FakeClient()
    job = Job(
        "j", request, [PromptTokens("ab", [64, 65])] * prompts, client=client, tokenizer=model.tokenizer,
        metrics=Metrics(), arrived=0.0, keep=keep,
    )  # fmt: skip
    job.start(InputProcessor(model.tokenizer, model.spec, 512), None)
    return job, client


def test_what_is_not_read_is_merged(model):
    async def run() -> None:
        job, client = start(model, n=2, logprobs=0, max_tokens=1000)
        assert client.added == ["j/0", "j/1"]
        for step in range(1000):
            for choice in range(2):
                entry = {64 + choice: Logprob(-1.0, 1)}
                reason = FinishReason.LENGTH if step == 999 else None
                job.take(TokenOutput(f"j/{choice}", [64 + choice], reason, logprobs=[entry]), None)
        first, second = await job.deltas()
        assert (first.index, first.text, len(first.logprobs), first.finish_reason) == (0, "a" * 1000, 1000, "length")
        assert second.text == "b" * 1000 and await job.deltas() == []
        assert job.completion_tokens == 2000 and not client.aborted

    asyncio.run(run())


def test_a_reader_that_keeps_up_gets_each(model):
    async def run() -> None:
        job, _ = start(model)
        for token in (64, 65, 66):
            job.take(TokenOutput("j", [token]), None)
            assert [delta.text for delta in await job.deltas()] == [chr(33 + token)]

    asyncio.run(run())


def test_a_stop_string_ends_one_choice_in_the_engine(model):
    async def run() -> None:
        job, client = start(model, n=2, stop="bc")
        for token in (64, 65, 66):
            job.take(TokenOutput("j/0", [token]), None)
        assert client.aborted == ["j/0"] and not job.outcome
        (delta,) = await job.deltas()
        assert delta.text == "a" and delta.finish_reason == "stop"
        job.abandon()
        assert client.aborted == ["j/0", "j/1"] and job.outcome == "aborted"

    asyncio.run(run())


def test_an_error_of_one_choice_ends_all(model):
    async def run() -> None:
        job, client = start(model, prompts=2)
        job.take(TokenOutput("j.0", [64]), None)
        job.take(TokenOutput("j.1", [], FinishReason.ERROR, "no room"), None)
        with pytest.raises(ApiError, match="no room"):
            await job.deltas()
        assert "j.0" in client.aborted and job.outcome == "error"

    asyncio.run(run())


def test_a_prompt_that_cannot_be_served_sends_nothing(model):
    with pytest.raises(ApiError, match="vocabulary"):
        asyncio.run(_start_async(model))


async def _start_async(model: ModelText) -> None:
    start(model, logit_bias={"100000": 1})
