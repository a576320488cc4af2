"""Prompts that a model writes itself: the same for the same seed, gone on with, and refused where there is no template;
and what else training can begin with."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace import LLM  # noqa: E402
from headrace.config import ConfigError, EngineArgs  # noqa: E402
from headrace.loading.checkpoint import open_checkpoint  # noqa: E402
from headrace.train.batches import Batches  # noqa: E402
from headrace.train.drafters import EagleDrafter  # noqa: E402
from headrace.train.export import export  # noqa: E402
from headrace.train.heads import train_heads  # noqa: E402
from headrace.train.own_prompts import OwnPrompts, _users_turn, write_prompts  # noqa: E402
from headrace.train.settings import TrainArgs  # noqa: E402
from headrace.train.start import start_from  # noqa: E402
from headrace.train.target import Target  # noqa: E402
from headrace.train.texts import Text  # noqa: E402
from tiny import EOS, write_tiny_llama  # noqa: E402

FACTS = {"model": "tiny"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("own") / "model", layers=2))


def engine_args(model):
    return EngineArgs.make(model=model, device="cpu", num_threads=1, max_num_seqs=8)


def lines_of(folder):
    return (folder / "own-prompts.jsonl").read_text().splitlines()


def test_the_template_up_to_the_users_words(model):
    with LLM.from_args(engine_args(model)) as llm:
        prefix, params = _users_turn(llm.engine)
        assert prefix == [llm.engine.tokenizer.token_id("<|user|>")]
        assert params.stop_token_ids == (llm.engine.tokenizer.token_id(EOS),) and not params.stop


def test_a_turn_that_ends_in_plain_text(tmp_path):
    template = "{% for message in messages %}User: {{ message.content }}\nBot:{% endfor %}"
    with LLM.from_args(engine_args(str(write_tiny_llama(tmp_path / "m", template=template)))) as llm:
        prefix, params = _users_turn(llm.engine)
        assert llm.engine.tokenizer.decode(prefix) == "User: "
        assert params.stop == ("Bot:",) and not params.stop_token_ids


def test_prompts_are_those_of_their_seeds_and_gone_on_with(model, tmp_path):
    with LLM.from_args(engine_args(model)) as llm:
        whole = OwnPrompts(tmp_path / "whole", 40, FACTS)
        write_prompts(llm.engine, whole, lambda done, count: None)
        assert not whole.missing and 0 < len(whole.prompts) <= 40
        assert any(json.loads(line)["prompt"] is None for line in lines_of(tmp_path / "whole")[1:])  # no end of a turn

        def interrupt(done, count):
            if done > 10:
                raise KeyboardInterrupt

        parts = OwnPrompts(tmp_path / "parts", 40, FACTS)
        with pytest.raises(KeyboardInterrupt):
            write_prompts(llm.engine, parts, interrupt)
        again = OwnPrompts(tmp_path / "parts", 40, FACTS)
        assert 0 < len(again.missing) < 40
        write_prompts(llm.engine, again, lambda done, count: None)
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    assert OwnPrompts(tmp_path / "whole", 40, FACTS).prompts == whole.prompts == again.prompts


def test_files_that_are_not_its_own_are_refused(tmp_path):
    own = OwnPrompts(tmp_path, 2, FACTS)
    own.add(0, "one")
    own.flush()
    with pytest.raises(ConfigError, match=r"own-prompts\.jsonl is of another model"):
        OwnPrompts(tmp_path, 2, {"model": "other"})
    (tmp_path / "own-prompts.jsonl").write_text("[1")
    with pytest.raises(ConfigError, match=r"own-prompts\.jsonl is damaged .*delete it"):
        OwnPrompts(tmp_path, 2, FACTS)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "has no chat template"),
        ("{{ raise_exception('no') }}", "refuses a user's turn .*leave out --own-prompts"),
        ("<|user|>hello", "does not say where a user's turn begins"),
    ],
)
def test_models_without_a_users_turn_are_refused(tmp_path, template, message):
    folder = write_tiny_llama(tmp_path / "model", template=template or "x")
    if not template:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    with LLM.from_args(engine_args(str(folder))) as llm, pytest.raises(ConfigError, match=message):
        write_prompts(llm.engine, OwnPrompts(tmp_path, 2, FACTS), lambda done, count: None)


def test_training_on_nothing_but_own_prompts_and_from_there(model, tmp_path):
    settings = TrainArgs(
        own_prompts=24, num_tokens=400, max_tokens=24, epochs=1, draft_vocab=150, held_out=0.25, report_prompts=0,
        unroll=2, temperature=(0.0,), late_start=0.5,
    )  # fmt: skip
    first, second = tmp_path / "first", tmp_path / "second"
    facts = train_heads(engine_args(model), settings, [], first, lambda line: None)
    assert facts["prompts"] > 2 and facts["steps"] > 0
    told = []
    train_heads(engine_args(model), replace(settings, start_from=str(first)), [], second, told.append)
    rows = facts["draft_vocab"]
    assert f"training begins with {first}, {rows} of its output's rows" in told  # the same texts: the same tokens
    with pytest.raises(ConfigError, match="training needs prompts"):
        train_heads(engine_args(model), replace(settings, own_prompts=0), [], first)


@pytest.mark.parametrize("int8", [False, True])
def test_weights_to_start_from(model, tmp_path, int8):
    spec = open_checkpoint(model).spec
    torch.manual_seed(0)
    old, new = (EagleDrafter(spec, 2, torch.randn(count, 48), 64) for count in (4, 3))
    export(old, tmp_path / "old", spec, np.array([2, 5, 7, 9]), {}, int8)
    fresh = new.lm_head.weight.detach().clone()
    assert start_from(new, tmp_path / "old", np.array([5, 6, 9])) == 2
    near = {"atol": 0.02, "rtol": 0.02}
    assert torch.allclose(new.lm_head.weight[[0, 2]], old.lm_head.weight[[1, 3]], **near)
    assert torch.equal(new.lm_head.weight[1], fresh[1])
    assert torch.allclose(new.midlayer.mlp["down_proj"].weight, old.midlayer.mlp["down_proj"].weight, **near)
    with pytest.raises(ConfigError, match="give the --inner-size of that head"):
        start_from(EagleDrafter(spec, 2, torch.randn(3, 48), 80), tmp_path / "old", np.arange(3))
    with pytest.raises(ConfigError, match="holds no EAGLE head to start from"):
        start_from(new, tmp_path, np.arange(3))


def test_a_late_start_leaves_out_a_beginning_and_nothing_else(model):
    """Every text begins late: what is to be guessed is the same, and features are those of the whole text."""
    target = Target(open_checkpoint(model), torch.device("cpu"), torch.float32, 64)
    texts = [Text(np.arange(20, 50, dtype=np.int32), 12, 0), Text(np.arange(60, 85, dtype=np.int32), 9, 1)]
    ids = np.arange(100)
    (whole,) = Batches(target, texts, ids, 100, 0.0).one_pass(shuffled=False)
    for seed in range(4):
        late = Batches(target, texts, ids, 100, 0.0, seed, late_start=1.0)
        (plain,) = late.one_pass(shuffled=False)
        assert torch.equal(plain.place, whole.place)
        order = late.cut(shuffled=False)[0]
        made = late._make(order, 1.0)
        assert (made.place >= 0).sum(1).tolist() == (whole.place >= 0).sum(1).tolist()
        for line, index in enumerate(order):
            first = int((whole.place[line] >= 0).nonzero()[0] - (made.place[line] >= 0).nonzero()[0])
            assert 0 <= first < texts[index].prompt_len
            count = len(texts[index].tokens) - first
            assert torch.equal(made.features[line, :count], whole.features[line, first : first + count])
            assert torch.equal(made.embedded[line, :count], whole.embedded[line, first : first + count])
        assert torch.equal(made.wanted, whole.wanted)


def test_only_features_that_are_not_kept_are_made_again(model, monkeypatch):
    target = Target(open_checkpoint(model), torch.device("cpu"), torch.float32, 64)
    texts = [Text(np.arange(20, 50, dtype=np.int32), 12, 0), Text(np.arange(60, 85, dtype=np.int32), 9, 1)]
    batches = Batches(target, texts, np.arange(100), 100, 25 * target.spec.hidden_size * 2)  # there is room for one
    (first,) = batches.one_pass(shuffled=False)
    ran, hidden = [], target.hidden
    monkeypatch.setattr(target, "hidden", lambda tokens: ran.append(len(tokens)) or hidden(tokens))
    (second,) = batches.one_pass(shuffled=False)
    assert ran == [1]
    seen = first.place >= 0
    assert torch.allclose(second.features[seen], first.features[seen], atol=5e-3)  # kept in 16 bits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"own_prompts": -1}, "own_prompts must be at least 0"),
        ({"late_start": 1.5}, "late_start must be from 0 to 1"),
        ({"kind": "medusa", "start_from": "x"}, "start_from is for EAGLE heads"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(ConfigError, match=message):
        TrainArgs(**given)
