"""Heads that continue the last hidden state, on a GPU's code: those of train-heads, and multi-token prediction."""

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.loading.checkpoint import open_checkpoint
from headrace.train.drafters import EagleDrafter
from headrace.train.export import export
from tiny import write_tiny_llama

PROMPTS = [[65, 66, 67] * 4, list(range(30, 50))]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {"mode": "exact", "max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 2, "kv_cache": "1MiB"}

pytestmark = pytest.mark.slow


def run(model, **options):
    """Tokens, and (verified, accepted) by place."""
    with LLM(model, **OPTIONS, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert not llm.engine.ledger.totals.proposers_dropped
        return [output.outputs[0].token_ids for output in outputs], llm.engine.ledger.totals.draft_positions


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_drafts_and_texts_are_those_of_the_cpu(tmp_path, gpu_engine, kind):
    model = str(write_tiny_llama(tmp_path / "model", mtp=True))
    options = {"speculate": kind, "num_draft_tokens": 3}
    if kind == "eagle":
        spec, ids = open_checkpoint(model).spec, np.arange(20, 140)
        torch.manual_seed(0)
        drafter = EagleDrafter(spec, 3, torch.randn(len(ids), spec.hidden_size), 64)
        export(drafter, tmp_path / "head", spec, ids, {})
        options["draft_model"] = str(tmp_path / "head")
    plain, _ = run(model, device="cpu")
    wanted, places = run(model, device="cpu", **options)
    found, on_gpu = run(model, device="cuda", **options)
    assert plain == wanted == found
    assert on_gpu == places and places[0][0] > 0
