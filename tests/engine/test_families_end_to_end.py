"""Families with window layers, experts and sinks through the whole engine: the greedy tokens of transformers, the same
alone and in company, with several layer groups over one pool of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from models.oracles import oracle, oracle_logits, prompt
from models.test_families import CASES
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def write_model(folder: Path, case: str) -> Any:
    """A tiny random model, stored in bf16, with a byte-level tokenizer beside it; returns transformers' model."""
    write_tiny_llama(folder)  # for its tokenizer
    family, changes = CASES[case]
    model = oracle(family, **changes, vocab_size=260)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    rounded = {key: value.bfloat16() for key, value in model.state_dict().items()}
    model.load_state_dict(rounded)  # the same numbers as float32
    model.save_pretrained(folder, state_dict=rounded)
    return model


@pytest.mark.parametrize("case", ["gemma3", "gemma2-caps-bite", "gpt-oss", "qwen3-moe", "olmo2"])
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = write_model(tmp_path, case)
    prompts = [prompt(length, seed=length) for length in (90, 5, 61)]
    options = dict(max_num_seqs=4, max_num_batched_tokens=32, kv_cache="8MiB", max_model_len=256)
    with LLM(str(tmp_path), mode="exact", **options) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        alone = [llm.generate([each], GREEDY)[0].outputs[0].token_ids for each in prompts]
    assert together == alone
    for each, found in zip(prompts, together, strict=True):
        logits = oracle_logits(reference, [*each, *found])[len(each) - 1 : -1]
        chosen = logits[np.arange(len(found)), found]
        assert (logits.max(axis=-1) - chosen).max() <= 1e-4 * np.abs(logits).max()
