"""A few of the cases with the default model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import TEXT, Server, serve_command, until

pytestmark = pytest.mark.slow
QUESTION = "What is the capital of France? Answer in one word."


@pytest.fixture(scope="module")
def real(default_model_path):
    with Server(serve_command(default_model_path), {"HEADRACE_NATIVE": "1", "HEADRACE_CHECK": "0"}) as running:
        yield running


def test_a_natural_end(real):  # S01, S02
    fields = {"temperature": 0, "max_tokens": 40}
    whole = real.chat(QUESTION, **fields).json
    assert whole["choices"][0]["finish_reason"] == "stop" and "Paris" in whole["choices"][0]["message"]["content"]
    streamed = real.chat(QUESTION, **fields, stream=True, stream_options={"include_usage": True})
    assert streamed.choices()[0] == (whole["choices"][0]["message"]["content"], ["stop"])
    assert streamed.events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    short = real.chat(QUESTION, temperature=0, max_tokens=2, stream=True).choices()[0]
    assert short[1] == ["length"] and whole["choices"][0]["message"]["content"].startswith(short[0])


def test_a_seed_under_load(real):  # P08
    fields = {"temperature": 1.2, "max_tokens": 24, "seed": 5}
    alone = real.text("Once upon a time", **fields).json["choices"][0]["text"]
    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(real.text, f"Number {i} is", max_tokens=24) for i in range(8)]
        loaded = pool.submit(real.text, "Once upon a time", **fields).result()
        assert all(other.result().status == 200 for other in others)
    assert loaded.json["choices"][0]["text"] == alone


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes(real, stream):  # S13
    with real.open(TEXT, {"prompt": "Rivers", "max_tokens": 4000, "ignore_eos": True, "stream": stream}):
        time.sleep(0.3)
    until(real.is_idle, 2)
    before = real.metric("headrace_generated_tokens_total")
    time.sleep(0.5)
    assert real.metric("headrace_generated_tokens_total") == before
