"""Heads that come with Headrace: taken without being named, for the model they were made for and no other."""

import json
from pathlib import Path

import pytest
from test_eagle import PROMPTS, write_head

from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.loading import released
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.errors import CheckpointError
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model with a head of its own in the folder of released ones."""
    path = str(write_tiny_llama(tmp_path / "target", layers=6))
    monkeypatch.setattr(released, "FOLDERS", (tmp_path / "missing", tmp_path / "models"))
    head = Path(write_head(tmp_path / "models" / "target-eagle", 3))
    checkpoint = open_checkpoint(path)
    facts = {"model": checkpoint.name, "model_bytes": checkpoint.num_bytes}
    (head / "training.json").write_text(json.dumps(facts))
    return path


@pytest.mark.parametrize("speculate", ["auto", "eagle"])
def test_a_head_for_the_model_is_found(model, speculate):
    with LLM(model) as plain, LLM(model, speculate=speculate) as llm:
        assert "eagle" in llm.engine.config.proposers
        wanted, found = plain.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY)
        assert [output.outputs for output in found] == [output.outputs for output in wanted]
        assert not llm.engine.ledger.totals.proposers_dropped


def test_a_file_may_have_another_name(model, tmp_path):
    class Named:
        file = type("File", (), {"metadata": {"general.name": "Target"}})()
        spec = open_checkpoint(model).spec

    identity = released.model_identity(Named())
    assert released.model_identity(open_checkpoint(model)) is None and identity["name"] == "Target"
    facts = tmp_path / "models" / "target-eagle" / "training.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "identity": identity}))
    assert released.released_heads("renamed", 5, identity) == facts.parent
    assert released.released_heads("renamed", 5, {**identity, "hidden_size": 1}) is None
    assert released.released_heads("renamed", 5) is None


def test_another_model_has_none(model, tmp_path):
    other = str(write_tiny_llama(tmp_path / "other" / "target", layers=4))  # of the same name
    with LLM(other, speculate="auto") as llm:
        assert llm.engine.config.proposers == ("suffix", "ngram")
    with pytest.raises(ConfigError, match="no EAGLE head comes with Headrace for target; give draft_model"):
        LLM(other, speculate="eagle")


def test_a_damaged_head_keeps_no_model_from_running(model, tmp_path, caplog):
    """`auto` says one line and goes on; `eagle`, which asks for the head, ends with the file's name."""
    head = tmp_path / "models" / "target-eagle"
    for name, content in (
        ("model.safetensors", (head / "model.safetensors").read_bytes()[:5000]),
        ("config.json", b"{"),
        ("config.json", b'{"architectures": 5}'),
        ("training.json", b"{"),
    ):
        whole = (head / name).read_bytes()
        (head / name).write_bytes(content)
        caplog.clear()
        with LLM(model, speculate="auto") as llm:
            assert llm.engine.config.proposers == ("suffix", "ngram")
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("headrace: ") and "left out" in line and str(head) in line
        with pytest.raises((CheckpointError, ConfigError)):
            LLM(model, speculate="eagle")
        (head / name).write_bytes(whole)
