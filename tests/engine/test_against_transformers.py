"""The default model in fp32: the same greedy tokens as transformers on the same dequantised weights."""

import numpy as np
import pytest

from headrace import LLM, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [
    "Why is the sky blue?",
    "Write a haiku about rivers.",
    "def fibonacci(n):",
    "List three uses of copper.",
    "Translate to French: good morning",
    "What is 17 times 3?",
    "Tell me a short story about a fox.",
    "Explain recursion to a child.",
    "The capital of Australia is",
    "Name the planets in order.",
    "Once upon a time",
    "import numpy as np\n",
    "How do plants make food?",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Hamlet.",
    "What does HTTP 404 mean?",
    "2024-02-29 is a",
    "Who wrote Faust?",
    "Describe the water cycle.",
    "SELECT name FROM users WHERE",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=11, max_tokens=64, ignore_eos=True)
NEAR = 1e-3  # logits closer than this may be ordered differently by another summation order


@pytest.fixture(scope="module")
def llm(default_model_path):
    with LLM(str(default_model_path), mode="exact") as made:
        yield made


@pytest.fixture(scope="module")
def peer(llm):
    from headrace.bench.transformers_peer import load_peer

    return load_peer(llm.engine.checkpoint)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_tokens_equal_transformers(llm, peer):
    import torch

    prompts = [llm.render([{"role": "user", "content": text}]) for text in PROMPTS]
    together = tokens(llm.generate(prompts, GREEDY))
    assert together == [tokens(llm.generate([prompt], GREEDY))[0] for prompt in prompts]
    ties = []
    for prompt, ours in zip(prompts, together, strict=True):
        with torch.inference_mode():
            logits = peer.model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1].numpy()
        theirs = logits.argmax(axis=-1)
        for position in np.flatnonzero(theirs != np.array(ours)):
            gap = float(logits[position].max() - logits[position, ours[position]])
            ties.append((position, gap))
            assert gap < NEAR, f"position {position}: transformers prefers another token by {gap:.2g}"
    print(f"{len(ties)} near-ties of {len(PROMPTS) * 64} tokens: {ties}")


def test_seeded_sampling_is_the_same_alone_and_together(llm):
    prompts = [llm.render([{"role": "user", "content": text}]) for text in PROMPTS]
    together = tokens(llm.generate(prompts, SAMPLED))
    assert together == [tokens(llm.generate([prompt], SAMPLED))[0] for prompt in prompts]
    assert together != tokens(llm.generate(prompts, GREEDY))
