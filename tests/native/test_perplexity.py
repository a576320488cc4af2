"""How well the default model predicts text in each mode, against the references, on texts that come with Python."""

from __future__ import annotations

import json
import math
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.loading.store import list_models
from headrace.ops.native.library import available_paths

SPANS, LENGTH = 6, 400

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(model.name == "smollm2-135m" for model in list_models()),
        reason="the default model is not on disk (headrace pull)",
    ),
]


def texts(llm: LLM) -> list[list[int]]:
    """Token ids of SPANS stretches of Python's help texts."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics) if isinstance(topics[name], str))
    ids = llm.engine.tokenizer.encode(text[: SPANS * LENGTH * 8], add_special=False)
    return [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(SPANS)]


def judged(**options: object) -> tuple[float, np.ndarray, np.ndarray]:
    """(perplexity; best next token; how far its log-probability is above the second's) over all positions."""
    losses, best, gaps = [], [], []
    with LLM(prefix_caching=False, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
        prompts = texts(llm)
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
                losses.append(-entry[token].logprob)
                by_score = sorted(entry.items(), key=lambda item: -item[1].logprob)
                best.append(by_score[0][0])
                gaps.append(by_score[0][1].logprob - by_score[1][1].logprob)
    return math.exp(sum(losses) / len(losses)), np.array(best), np.array(gaps)


def judged_apart(mode: str, **environment: str) -> tuple[float, np.ndarray, np.ndarray]:
    """judged(mode=mode) in a process of its own."""
    script = (
        f"import json; from native.test_perplexity import judged; p, b, g = judged(mode={mode!r});"
        "print(json.dumps([p, b.tolist(), g.tolist()]))"
    )
    environment = {**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    perplexity, best, gaps = json.loads(done.stdout)
    return perplexity, np.array(best), np.array(gaps)


@pytest.fixture(scope="module")
def reference() -> tuple[float, np.ndarray, np.ndarray]:
    """From a process without the native kernels, in fp32."""
    return judged_apart("exact", HEADRACE_NATIVE="0")


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"mode": "exact"}, 0.001),
        ({"mode": "default"}, 0.005),
        ({"mode": "default", "kv_dtype": "int8"}, 0.005),
        ({"mode": "int8"}, 0.01),
    ],
    ids=["exact", "default", "default-int8-kv", "int8"],
)
def test_perplexity_and_agreement(options: dict, most: float, reference: tuple) -> None:
    compare(judged(**options), reference, most)


@pytest.mark.parametrize("mode", ["default", "fast"])
def test_on_tiles(mode: str, reference: tuple) -> None:
    """The AMX path, emulated where there is no AMX: bfloat16, which is coarser than integers of 16 bits."""
    path = next((path for path in available_paths() if path.startswith("amx")), None)
    if path is None:
        pytest.skip("the emulation needs AVX-512")
    compare(judged_apart(mode, HEADRACE_NATIVE_PATH=path), reference, 0.005)


def compare(judgement: tuple, reference: tuple, most: float) -> None:
    """Perplexity within a share of `most`, and the same best token wherever it leads by 0.5."""
    expected, best, gaps = reference
    perplexity, found, _ = judgement
    assert abs(perplexity / expected - 1) < most, (perplexity, expected)
    parted = (found != best) & (gaps > 0.5)
    assert len(best) > 2000 and (gaps > 0.5).sum() > 1000
    assert not parted.any(), f"{parted.sum()} of {(gaps > 0.5).sum()} clear positions differ"
