"""Latency objectives on a real engine: what was decided stands in the ledger, and the text does not change."""

from __future__ import annotations

import pytest

from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from tiny import write_tiny_llama

PROMPTS = [list(range(40, 60)), list(range(40, 240)), list(range(41, 140))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_an_objective_that_cannot_be_kept_leaves_small_chunks(folder):
    with LLM(folder) as plain, LLM(folder, itl_slo=0.001, max_num_seqs=4) as paced:
        expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, PARAMS)]
        outputs = paced.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        records = paced.engine.ledger.records()
        assert any("ITL" in each.reason and each.chosen == "16" for r in records for each in r.decisions) or any(
            "not admitted: a step of" in refusal for r in records for refusal in r.refusals
        )
        assert paced.engine.config.max_num_batched_tokens == 1024
        assert plain.engine.config.max_num_batched_tokens == 256


def test_an_objective_that_is_easily_kept_changes_nothing(folder):
    with LLM(folder, itl_slo=1e6, ttft_slo=1e6) as llm:
        llm.generate(PROMPTS, PARAMS)
        assert not any(r.decisions or r.refusals for r in llm.engine.ledger.records())


@pytest.mark.parametrize("options", [{"itl_slo": 0}, {"ttft_slo": -1}, {"itl_slo": "fast"}, {"itl_slo": True}])
def test_objectives_that_cannot_be(folder, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        LLM(folder, **options)


def test_objectives_need_the_ledger(folder):
    with pytest.raises(ConfigError, match="ledger"):
        LLM(folder, itl_slo=50, ledger=False)
