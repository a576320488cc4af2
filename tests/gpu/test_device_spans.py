"""Steps that verify drafts, with contexts split and unsplit: the tokens of the CPU engine either way."""

import pytest

import headrace.attention.triton as backend
from headrace import LLM, SamplingParams
from headrace.ops.triton.attention_table import AttentionRule
from tiny import write_tiny_llama

PARAMS = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)] * 3
PROMPTS = [[65, 66, 67] * 40, [90, 91] * 12, [70]]
SMALL = {"max_model_len": 160, "max_num_batched_tokens": 64, "max_num_seqs": 4, "mode": "exact", "kv_cache": "1MiB"}


WAYS = [
    pytest.param(True, True, id="split-padded", marks=pytest.mark.slow),
    pytest.param(True, False, id="split-as they are", marks=pytest.mark.slow),
    pytest.param(False, True, id="unsplit-padded", marks=pytest.mark.slow),
    pytest.param(False, False, id="unsplit-as they are", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("split", "graphs"), WAYS)
def test_tokens_of_verified_drafts(split, graphs, tmp_path, gpu_engine, monkeypatch):
    path, calls, whole = str(write_tiny_llama(tmp_path, window=20, layers=1)), [], backend.span_attention

    def counted(*arguments):
        calls.append(arguments)
        whole(*arguments)

    monkeypatch.setattr(backend, "span_attention", counted)
    rule = AttentionRule(alone_from=768, fused_rows=64, split_rows=33 if split else 0)
    monkeypatch.setattr(backend, "attention_rule", lambda shape, dtype: rule)
    with LLM(path, device="cpu", **SMALL) as llm:
        want = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS)]
    with LLM(path, device="cuda", speculate="ngram", num_draft_tokens=4, cuda_graphs=graphs, **SMALL) as llm:
        got = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS)]
        assert llm.engine.ledger.totals.draft_tokens > 0
        llm.engine.core.scheduler.check()
    assert got == want
    assert bool(calls) == split
