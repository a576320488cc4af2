"""Token trees through the whole engine: the same texts, and branches that are really taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.sampling.params import Grammar
from headrace.worker import runner
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
FEW = (70, 71, 72, 73)  # with few tokens to choose from a text repeats itself, and look-ups find it again
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]
PARAMS = {
    "greedy": GREEDY.with_(allowed_token_ids=FEW),
    "sampled": GREEDY.with_(temperature=0.9, seed=3, allowed_token_ids=FEW),
    "penalties": GREEDY.with_(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, allowed_token_ids=tuple(range(60, 90))
    ),
    "bad words": GREEDY.with_(bad_words=("a", "F", "FG"), temperature=1.0, seed=9, allowed_token_ids=FEW),
    "stop": GREEDY.with_(stop=("HIH", "d"), temperature=0.8, seed=2, allowed_token_ids=tuple(range(68, 76))),
    "choices": GREEDY.with_(n=3, temperature=0.9, seed=4, allowed_token_ids=FEW),
    "logprobs": GREEDY.with_(logprobs=3, temperature=0.6, seed=1, allowed_token_ids=FEW),
    "grammar": GREEDY.with_(grammar=Grammar("regex", "(ab|ac|ba){9,12}"), temperature=0.9, seed=6, ignore_eos=False),
}
WAYS: dict[str, dict[str, Any]] = {
    "ngram": {"speculate": "ngram", "num_draft_tokens": 4, "draft_tree": 9},
    "suffix": {"speculate": "suffix", "num_draft_tokens": 5, "draft_tree": 20},
    "draft": {"speculate": "draft", "num_draft_tokens": 3, "draft_tree": 14},
    "merged": {"speculate": "auto", "num_draft_tokens": 4, "draft_tree": 16, "draft_model": ""},
    "budget by cost": {"speculate": "auto", "draft_tree": 24, "draft_model": ""},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The model, its twin with a window, and another model that drafts, wrongly every so often."""
    root = tmp_path_factory.mktemp("trees")
    return {
        "plain": str(write_tiny_llama(root / "plain", layers=1)),
        "window": str(write_tiny_llama(root / "window", layers=2, window=9)),
        "draft": str(write_tiny_llama(root / "draft", layers=1, window=5)),
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[tuple[str, str], Any]:
    found = {}
    for model in ("plain", "window"):
        with LLM(folders[model]) as llm:
            for name, params in PARAMS.items():
                found[model, name] = told(llm.generate(PROMPTS, params))
    return found


def told(outputs: Any) -> Any:
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in output.outputs] for output in outputs]


def options(folders: dict[str, str], way: str) -> dict[str, Any]:
    found = dict(WAYS[way])
    if way == "draft" or "draft_model" in found:
        found["draft_model"] = folders["draft"]
    return found


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step with trees: whether an accepted path was not the first nodes."""
    found: list[bool] = []
    original = runner.keep_paths

    def keep_paths(*arguments: Any) -> np.ndarray | None:
        order = original(*arguments)
        found.append(order is not None)
        return order

    monkeypatch.setattr(runner, "keep_paths", keep_paths)
    return found


@pytest.mark.parametrize("model", ["plain", "window"])
@pytest.mark.parametrize("way", WAYS)
def test_texts_are_the_same(folders: Any, expected: Any, moves: list[bool], way: str, model: str) -> None:
    with LLM(folders[model], **options(folders, way)) as llm:
        for name, params in PARAMS.items():
            for _ in range(2):  # the second time the prompts are in the prefix cache
                assert told(llm.generate(PROMPTS, params)) == expected[model, name], name
        llm.engine.core.scheduler.check()
    if way != "budget by cost":  # a tiny model's times decide there
        assert len(moves) > 20 and any(moves), "there were trees, and branches were taken"


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_in_any_company(folders: dict[str, str], expected: dict[tuple[str, str], Any], data: st.DataObject) -> None:
    way, model = data.draw(st.sampled_from(list(WAYS))), data.draw(st.sampled_from(["plain", "window"]))
    size = data.draw(st.sampled_from([2, 4, 16]))
    more: dict[str, Any] = {
        "draft_tree": data.draw(st.integers(1, 64)),
        "block_size": size,
        "max_num_batched_tokens": data.draw(st.sampled_from([6, 17, 256])),
        "max_num_seqs": data.draw(st.integers(3, 6)),
        "attention_backend": data.draw(st.sampled_from([None, "reference"])),
        "prefix_caching": data.draw(st.booleans()),
        "max_model_len": 80,
    }
    if data.draw(st.booleans()):  # memory for one text and a half: the younger ones are preempted
        more["kv_cache"] = 120 * (2 if model == "window" else 1) * 96
    names = data.draw(st.lists(st.sampled_from(list(PARAMS)), min_size=1, max_size=3))
    if more["attention_backend"]:  # its numbers are not, bit for bit, those of the native one
        with LLM(folders[model], attention_backend="reference", max_model_len=80) as llm:
            wanted = [told(llm.generate(PROMPTS, PARAMS[name])) for name in names]
    else:
        wanted = [expected[model, name] for name in names]
    with LLM(folders[model], **{**options(folders, way), **more}) as llm:
        assert [told(llm.generate(PROMPTS, PARAMS[name])) for name in names] == wanted
        llm.engine.core.scheduler.check()


def test_preempted_requests_go_on_with_the_same_text(folders: Any, expected: Any, moves: list[bool]) -> None:
    room = {"kv_cache": 120 * 96, "block_size": 4, "max_model_len": 80}
    with LLM(folders["plain"], **options(folders, "merged"), **room) as llm:
        assert told(llm.generate(PROMPTS, PARAMS["greedy"])) == expected["plain", "greedy"]
        assert sum(len(record.preempted) for record in llm.engine.ledger.records()) > 0
        llm.engine.core.scheduler.check()
    assert any(moves)


def test_what_cannot_be_is_refused(folders: dict[str, str]) -> None:
    for bad, message in (
        ({"draft_tree": 8}, "give speculate=auto"),
        ({"speculate": "ngram", "draft_tree": 65}, "from 0 to 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(folders["plain"], **bad)


def test_more_nodes_take_fewer_steps(folders: dict[str, str]) -> None:
    """Of a draft model that is often wrong, its second choices are worth having."""
    params, steps = GREEDY.with_(allowed_token_ids=tuple(range(40, 140)), temperature=1.2, seed=5), []
    for nodes in (0, 18):
        with LLM(
            folders["plain"], speculate="draft", draft_model=folders["draft"], num_draft_tokens=3, draft_tree=nodes
        ) as llm:
            llm.generate(PROMPTS, params)
            steps.append(len(llm.engine.ledger.records()))
    assert steps[1] < steps[0]
