"""Draft models that guess all tokens of a draft in one pass (PARD), on a GPU's code: the drafts of the CPU engine."""

import sys
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.worker.device_chain import ChainRunner
from tiny import write_tiny_llama

sys.path.insert(0, str(Path(__file__).parent.parent / "spec"))
from test_parallel_draft import write_draft

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
PROMPTS = [[90, 3], list(range(30, 70)), [65, 66, 67] * 4]
PARAMS = [GREEDY.with_(temperature=0.9, top_k=50, seed=3), GREEDY, GREEDY.with_(repetition_penalty=1.2, max_tokens=5)]
OPTIONS = {"mode": "exact", "max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_draft_tokens": 3}
DEVICE = {"device": "cuda", "kv_cache": "1MiB"}
CASES = {
    "one row": (1, {}),
    "chain": (2, {}),
    "windowed, three rows": (3, {}),
    "tree": (2, {"draft_tree": 8}),
    "residual": (2, {"verify": "residual"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    return {
        "target": str(write_tiny_llama(folder / "target", layers=1)),
        "twin": write_draft(folder / "twin", layers=1),  # its first guess is always right
        "windowed": write_draft(folder / "windowed", seed=4, layers=1, window=9),
        "far": write_draft(folder / "far", token=5000, layers=1),
    }


def run(model, count, **options):
    """Tokens, and (verified, accepted) by place."""
    with LLM(model, **{**OPTIONS, "speculate": "draft", **options}) as llm:
        outputs = llm.generate(PROMPTS[:count], PARAMS[:count])
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        proposer.runner.check()
        llm.engine.core.scheduler.check()
        return [output.outputs[0].token_ids for output in outputs], llm.engine.ledger.totals.draft_positions


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name != "one row")) for name in CASES])
def test_drafts_and_texts_are_those_of_the_cpu(models, gpu_engine, monkeypatch, case):
    passes, original = [], ChainRunner.guess
    monkeypatch.setattr(ChainRunner, "guess", lambda self, plan: passes.append(plan) or original(self, plan))
    count, options = CASES[case]
    options = {"draft_model": models["windowed" if "windowed" in case else "twin"], **options}
    texts, places = run(models["target"], count, device="cpu", **options)
    found, on_gpu = run(models["target"], count, **DEVICE, **options)
    assert found == texts
    if count < 3:  # a penalty is no part of what is drafted on a GPU
        assert on_gpu == places
    assert places[0][0] > 1 and len(passes) > 1
    if case == "chain":
        assert on_gpu[0][1] == on_gpu[0][0]


def test_a_mask_token_that_cannot_be_is_refused(models, gpu_engine):
    with pytest.raises(ValueError, match="the mask token 5000 is not one of the 260 of the draft model"):
        LLM(models["target"], speculate="draft", draft_model=models["far"], **DEVICE, **OPTIONS)
