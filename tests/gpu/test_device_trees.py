"""Token trees on a GPU's code: the text is that of the CPU engine without drafts, and branches are really taken."""

import sys
from pathlib import Path

import pytest

import headrace.worker.device_worker as device_worker
from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.spec.combined import CombinedProposer
from headrace.spec.tree import TokenTree, packed
from headrace.worker.device_trees import StepTrees
from tiny import write_tiny_llama

sys.path.insert(0, str(Path(__file__).parent.parent / "spec"))
from test_device_speculation import Knowing
from test_eagle import write_head

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]
PARAMS = [
    GREEDY,
    GREEDY.with_(temperature=0.8, top_k=20, seed=4),
    GREEDY.with_(repetition_penalty=1.3, logprobs=2, temperature=0.9, seed=1),
    GREEDY.with_(temperature=0.7, n=2, seed=9),
]
SMALL = {"mode": "exact", "max_model_len": 96, "max_num_batched_tokens": 40, "max_num_seqs": 5}
DEVICE = {"device": "cuda", "kv_cache": "1MiB"}


def texts(outputs):
    return [[(c.token_ids, c.finish_reason, c.logprobs and len(c.logprobs)) for c in o.outputs] for o in outputs]


class Branching(Knowing):
    """Trees of which one path is what is coming, as far as it goes, behind and beside wrong nodes."""

    def __init__(self, known):
        super().__init__(known, num_tokens=3, wrong=0)

    def propose(self, context):
        assert context.nodes
        trees = []
        for row, limit in zip(context.rows.tolist(), context.limits, strict=True):
            known, text, tree = int(context.num_tokens[row]), self.rows[row], TokenTree()
            assert context.token_ids[row, :known].tolist() == text[:known], "the host's table has what was drawn"
            coming = text[known : known + min(limit, self.num_tokens)]
            if coming and known % 5:
                tree.add_path([(coming[0] + 1) % 250] * 2, [0.95, 0.9])
                tree.add_path([*coming[:-1], (coming[-1] + 1) % 250], [0.8, 0.7, 0.6][: len(coming)])
                tree.add_path(coming, [0.8, 0.7, 0.5][: len(coming)])
            trees.append(tree)
        return packed(trees, context.nodes)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    return {
        "window": str(write_tiny_llama(folder / "window", window=20, layers=1)),
        "plain": str(write_tiny_llama(folder / "plain", layers=2)),
        "other": str(write_tiny_llama(folder / "other", layers=1, window=5)),
        "head": write_head(folder / "head", 1),
    }


@pytest.fixture(scope="module")
def expected(models):
    found = {}
    for name in ("window", "plain"):
        with LLM(models[name], device="cpu", **SMALL) as llm:
            found[name] = texts(llm.generate(PROMPTS, PARAMS))
    return found


@pytest.fixture
def branching(monkeypatch, expected):
    def install(model):
        known = {
            (tuple(prompt), index): choice[0]
            for prompt, choices in zip(PROMPTS, expected[model], strict=True)
            for index, choice in enumerate(choices)
        }
        made = CombinedProposer([("ngram", Branching(known))])
        monkeypatch.setattr(device_worker, "make_device_proposer", lambda *rest: made)

    return install


@pytest.fixture
def moved(monkeypatch):
    """Of each step with trees: whether an accepted path was not the first nodes."""
    found, original = [], StepTrees.order

    def order(self, paths):
        result = original(self, paths)
        found.append(result is not None)
        return result

    monkeypatch.setattr(StepTrees, "order", order)
    return found


CASES = {
    "padded": ("window", [0, 1], {}),
    "as they are, rows of the host": ("plain", [2], {"cuda_graphs": False}),
}
MORE = {
    "all": ("plain", range(4), {}),
    "preempted": ("window", range(4), {"kv_cache": 10 * 16 * 2 * 2 * 12 * 4}),
    "small blocks, no prefixes": ("plain", range(4), {"block_size": 4, "prefix_caching": False}),
}


@pytest.mark.parametrize(
    "case", [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in MORE.values())],
    ids=[*CASES, *MORE],
)  # fmt: skip
def test_texts_are_those_without_drafts(models, expected, gpu_engine, branching, moved, case):
    name, chosen, options = case
    branching(name)
    more = {"speculate": "ngram", "num_draft_tokens": 3, "draft_tree": 9}
    with LLM(models[name], **{**SMALL, **DEVICE, **more, **options}) as llm:
        found = texts(llm.generate([PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen]))
        assert found == [expected[name][i] for i in chosen]
        totals = llm.engine.ledger.totals
        assert totals.accepted_draft_tokens > 4 * len(chosen) and sum(moved) > 1
        llm.engine.core.scheduler.check()


@pytest.mark.slow
def test_trees_of_all_that_draft_as_far_as_they_pay(models, expected, gpu_engine):
    options = {"speculate": "auto", "draft_tree": 12, "draft_model": models["other"]}
    with LLM(models["plain"], **SMALL, **DEVICE, **options) as llm:
        assert texts(llm.generate(PROMPTS, PARAMS)) == expected["plain"]
        assert not llm.engine.ledger.totals.proposers_dropped
        llm.engine.core.scheduler.check()


@pytest.mark.slow
def test_look_ups_in_trees(models, gpu_engine, moved):
    few = GREEDY.with_(allowed_token_ids=(70, 71, 72), max_tokens=24)
    params = [few, GREEDY, few.with_(temperature=0.8, seed=3), GREEDY.with_(temperature=0.9, seed=1)]
    with LLM(models["plain"], device="cpu", **SMALL) as llm:
        want = texts(llm.generate(PROMPTS, params))
    options = {"speculate": "suffix", "num_draft_tokens": 4, "draft_tree": 12}
    with LLM(models["plain"], **SMALL, **DEVICE, **options) as llm:
        assert texts(llm.generate(PROMPTS, params)) == want
        assert texts(llm.generate(PROMPTS, params)) == want, "prompts and answers are in the prefix cache now"
        assert llm.engine.ledger.totals.accepted_draft_tokens > 10 and len(moved) > 5
        llm.engine.core.scheduler.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["other", "head"])
def test_networks_offer_alternatives(models, gpu_engine, moved, name):
    """Of a draft model the trees of the CPU engine, so as many drafts are accepted; heads do not grow theirs here."""
    options = {"speculate": "eagle" if name == "head" else "draft", "draft_model": models[name]}
    options |= {"num_draft_tokens": 3, "draft_tree": 12}
    params = [each.with_(max_tokens=8) for each in (GREEDY, GREEDY.with_(temperature=0.9, seed=3))]
    found = {}
    for device in ({"device": "cpu"}, DEVICE):
        with LLM(models["plain"], **SMALL, **options, **device) as llm:
            totals = llm.engine.ledger.totals
            outputs = texts(llm.generate(PROMPTS[1:3], params))
            found[device["device"]] = outputs, (totals.draft_tokens, totals.accepted_draft_tokens)
            assert not totals.proposers_dropped
            llm.engine.core.scheduler.check()
    assert found["cpu"][0] == found["cuda"][0] and moved
    assert name == "head" or found["cpu"][1] == found["cuda"][1]


def test_larger_trees_are_refused(models, gpu_engine):
    with pytest.raises(ConfigError, match="at most 63 on GPUs"):
        LLM(models["plain"], device="cuda", speculate="ngram", draft_tree=64)
