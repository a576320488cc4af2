"""Medusa heads and MLP speculators on a GPU's code: the drafts of the CPU engine, as chains and as trees, and the same
text as without."""

import sys
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from tiny import write_tiny_llama

sys.path.insert(0, str(Path(__file__).parent.parent / "spec"))
from test_medusa import write_heads
from test_mlp_speculator import write_speculator

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 5, [90]]
PARAMS = [
    GREEDY,
    GREEDY.with_(temperature=0.9, seed=3),
    GREEDY.with_(repetition_penalty=1.2, seed=1),
    GREEDY.with_(temperature=0.7, n=2, seed=9),
]
OPTIONS = {"mode": "exact", "max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 5}
DEVICE = {"device": "cuda", "kv_cache": "1MiB"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    return {
        "target": str(write_tiny_llama(folder / "target", layers=1)),
        "medusa": write_heads(folder / "medusa"),
        "mlp": write_speculator(folder / "mlp"),
    }


def run(model, chosen=range(4), **options):
    """Tokens, and (verified, accepted) by place."""
    with LLM(model, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate([PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen])
        llm.engine.core.scheduler.check()
        totals = llm.engine.ledger.totals
        assert not totals.proposers_dropped
        return [[c.token_ids for c in o.outputs] for o in outputs], totals.draft_positions


CASES = {
    "medusa": ("medusa", [0, 1], {}),
    "mlp": ("mlp", [0, 1], {}),
    "tree": ("medusa", range(4), {"draft_tree": 8}),
    "preempted": ("medusa", range(4), {"kv_cache": 6 * 16 * 2 * 2 * 12 * 4}),
    "residual": ("mlp", [1, 3], {"verify": "residual"}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("medusa", "mlp"))) for name in CASES]
)
def test_drafts_and_texts_are_those_of_the_cpu(models, gpu_engine, case):
    kind, chosen, more = CASES[case]
    options = {"speculate": kind, "draft_model": models[kind], "num_draft_tokens": 3, **more}
    there = {name: value for name, value in options.items() if name != "kv_cache"}
    wanted, places = run(models["target"], chosen, device="cpu", **there)
    found, on_gpu = run(models["target"], chosen, **{**DEVICE, **options})
    assert found == wanted and places[0][0] > 3
    if "verify" not in more:
        assert found == run(models["target"], chosen, device="cpu")[0]
    if "kv_cache" not in more:  # preempted rows are drafted for differently
        assert on_gpu == places
