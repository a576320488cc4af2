"""The head in models/: found for the default model as it is pulled, and the texts with it are those without."""

import shutil

import pytest

from headrace import LLM, SamplingParams
from headrace.loading.draft_heads import HeadCheckpoint, is_head
from headrace.loading.errors import CheckpointError
from headrace.loading.json_file import read_json
from headrace.loading.released import released_heads
from headrace.loading.store import BUILT_IN, DEFAULT_MODEL, list_models
from headrace.train.export import write_json

ON_DISK = any(model.name == DEFAULT_MODEL for model in list_models())


@pytest.fixture(scope="module")
def head():
    found = released_heads(DEFAULT_MODEL, BUILT_IN[DEFAULT_MODEL].num_bytes)
    assert found is not None
    return found


def test_the_folder_is_small_and_whole(head):
    assert is_head(head)
    assert {"README.md", "config.json", "model.safetensors", "training.json"} <= {each.name for each in head.iterdir()}
    checkpoint = HeadCheckpoint(head)
    assert checkpoint.num_bytes < 9_500_000
    assert checkpoint.taps == ()
    names = list(checkpoint.names())
    assert not any("_scale" in name for name in names)
    assert checkpoint.shape("lm_head.weight") == (checkpoint.draft_vocab, checkpoint.spec.hidden_size)
    assert all(checkpoint.read(name).std() > 0 for name in names)


def test_heads_in_other_formats_are_refused(head, tmp_path):
    shutil.copytree(head, tmp_path / "head")
    config = read_json(head / "config.json")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    write_json(tmp_path / "head" / "config.json", config)
    with pytest.raises(CheckpointError, match="weights of 4 bits"):
        HeadCheckpoint(tmp_path / "head")
    write_json(tmp_path / "head" / "config.json", config | {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(CheckpointError, match="heads are read in floats, or in int8"):
        HeadCheckpoint(tmp_path / "head")


@pytest.mark.skipif(not ON_DISK, reason="the default model is not on disk (headrace pull)")
@pytest.mark.parametrize("speculate", ["auto", "eagle"])
def test_texts_are_the_same(speculate):
    own = {"eagle": {"num_draft_tokens": 3}, "auto": {"suffix_tokens": 0}}
    wanted = None
    for each in ("off", speculate):
        with LLM(max_model_len=256, speculate=each, **own.get(each, {})) as llm:
            prompt = llm.render([{"role": "user", "content": "Name three rivers."}])
            params = [SamplingParams(temperature=heat, seed=1, max_tokens=16) for heat in (0.0, 0.7)]
            found = [output.outputs[0].token_ids for output in llm.generate([prompt, prompt], params)]
            if each == "off":
                wanted = found
                continue
            assert found == wanted
            assert "eagle" in llm.engine.config.proposers
            totals = llm.engine.ledger.totals
            assert not totals.proposers_dropped
            if speculate == "eagle":
                assert totals.accepted_draft_tokens > 0
