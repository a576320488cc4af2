"""Token trees as proposers make them: which nodes, in which order, with which values."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM
from headrace.autopilot.depth import AutoDepth
from headrace.core.plan import Admit
from headrace.core.request import Request
from headrace.spec.base import DraftContext, Drafts
from headrace.spec.combined import CombinedProposer
from headrace.spec.eagle import HeadRunner
from headrace.spec.ngram import NgramProposer
from headrace.spec.suffix import SuffixProposer
from headrace.spec.tree import TokenTree, product_tree
from spec import test_eagle, test_medusa
from spec.test_eagle import GREEDY, PARAMS, PROMPTS, Reference, everything


def paths_of(drafts: Drafts, row: int = 0) -> dict[tuple[int, ...], float]:
    """Path of tokens -> value, of a row's tree, whose order is checked, too."""
    assert drafts.tree is not None and drafts.values is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(drafts.tokens[row].tolist(), drafts.tree[row].tolist(), strict=True):
        if token >= 0:
            assert parent < len(paths), "parents come first"
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths), "no node twice"
    values = drafts.values[row, : len(paths)].tolist()
    assert values == sorted(values, reverse=True)
    return dict(zip(paths, values, strict=True))


def test_the_best_nodes_hang_together() -> None:
    tree = TokenTree()
    tree.add_path([1, 2, 3], [0.5, 0.4, 0.3])
    tree.add_path([1, 5], [0.6, 0.9])
    tree.add_path([7], [0.1])
    tokens, parents, values = tree.best(3)
    assert (tokens, parents, values) == ([1, 5, 2], [-1, 0, 0], [0.6, 0.6, 0.4])
    assert tree.best(99)[0] == [1, 5, 2, 3, 7]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_product_tree_has_the_likeliest_paths(data: st.DataObject) -> None:
    depths, ranks, most = (data.draw(st.integers(1, 4)) for _ in range(3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    probs = -np.sort(-rng.random((depths, ranks)), axis=1)
    tree = product_tree(np.tile(np.arange(ranks), (depths, 1)), probs, most)
    every = [
        float(np.prod([probs[depth, rank] for depth, rank in enumerate(path)]))
        for length in range(1, depths + 1)
        for path in product(range(ranks), repeat=length)
    ]
    np.testing.assert_allclose(tree.best(most)[2], sorted(every, reverse=True)[:most])


def look_up(proposer: Any, text: list[int], depth: int, nodes: int) -> dict[tuple[int, ...], float]:
    table = np.zeros((1, 200), np.int32)
    table[0, : len(text)] = text
    proposer.admit([Admit(0, "a", [1], 1, 0, GREEDY, 0, 0, frozenset())])
    drafts = proposer.propose(DraftContext(np.array([0]), table, np.array([len(text)]), [depth], nodes=nodes))
    return {} if drafts is None else paths_of(drafts)


def test_look_ups_offer_all_that_followed() -> None:
    text = [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 1, 2, 3]
    found = look_up(NgramProposer(2), text, 2, 8)
    assert set(found) == {(50,), (50, 51), (60,), (60, 61)} and found[(50,)] > found[(60,)]
    assert set(look_up(NgramProposer(2), text, 1, 8)) == {(50,), (60,)}
    assert len(look_up(NgramProposer(2), text, 2, 3)) == 3
    loop = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7, 8, 5, 6, 7]
    assert {(8,), (9,)} <= set(found := look_up(SuffixProposer(4, 0), loop, 4, 10)), found
    assert max(map(len, found)) <= 4


class Says:
    """A proposer that says one thing."""

    def __init__(self, drafts: Drafts):
        self._drafts = drafts

    def admit(self, admits: Any) -> None: ...

    def release(self, rows: Any) -> None: ...

    def propose(self, context: DraftContext) -> Drafts:
        return self._drafts


def test_several_proposers_share_one_tree() -> None:
    chain = Drafts(np.array([[4, 5, 6], [-1, -1, -1]], np.int32))
    tree = Drafts(
        np.array([[4, 8, 9], [3, -1, -1]], np.int32),
        tree=np.array([[-1, 0, -1], [-1, -1, -1]]),
        values=np.array([[0.9, 0.8, 0.1], [0.2, 0, 0]], np.float32),
    )
    both = CombinedProposer([("chain", Says(chain)), ("tree", Says(tree))])
    context = DraftContext(np.arange(2), np.zeros((2, 9), np.int32), np.ones(2, np.int32), [3, 3], nodes=4)
    merged = both.propose(context)
    assert merged is not None and merged.sources is not None
    assert list(paths_of(merged)) == [(4,), (4, 8), (4, 5), (4, 5, 6)]
    assert list(paths_of(merged, 1)) == [(3,)] and merged.sources.tolist() == [1, 1]


class Linear:
    def __init__(self, share: float):
        self.share = share

    def predict(self, count: int) -> float:
        return 1.0 + self.share * (count - 1)


class Tokens:
    def work(self, spans: np.ndarray, num_logits: int) -> int:
        return int(spans[2].sum())


def test_a_budget_of_nodes_follows_promises_and_what_came_of_them() -> None:
    def nodes(share: float, values: list[float], num_rows: int = 1, kept: float = 1.0) -> int:
        request = Request("a", [1], GREEDY, max_new_tokens=9)
        request.draft_values = values
        policy: Any = AutoDepth(Linear(share), Tokens(), 8)  # type: ignore[arg-type]
        for _ in range(400):
            policy.observe(request, len(values), round(kept * sum(values)))
        return int(policy.depth(request, len(values), num_rows))

    fair = [0.8, 0.6, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02]  # 2.57 in all
    assert nodes(0.001, fair, kept=1.2) == 8
    assert 0 < nodes(0.2, fair, kept=1.2) < 8
    assert nodes(0.2, fair, kept=0.0) == 0
    assert nodes(0.9, [0.4, 0.3], num_rows=16) == 0


# -- heads


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("trees")
    return {
        "target": str(test_eagle.write_tiny_llama(folder / "target", layers=6)),
        "eagle1": test_eagle.write_head(folder / "one", 1),
        "eagle3": test_eagle.write_head(folder / "three", 3),
        "medusa": test_medusa.write_heads(folder / "medusa"),
    }


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_children_are_the_likeliest_behind_their_path(models: dict[str, str], head: str, monkeypatch: Any) -> None:
    reference = Reference(models[head], models["target"])
    features: dict[tuple[int, int], np.ndarray] = {}
    keep, compared, deep = HeadRunner._keep, [], 0

    def kept(self: Any, step: Any, num_tokens: Any) -> None:
        keep(self, step, num_tokens)
        for row, start, first, end in zip(step.rows, step.starts, step.query_start, step.query_start[1:], strict=False):
            count = min(end - first, int(step.num_computed[row]) - start)
            for offset in range(count):
                features[int(row), int(start) + offset] = np.array(step.values[first + offset])

    def behind(tokens: list[int], own: np.ndarray, path: tuple[int, ...]) -> np.ndarray:
        """Logits behind a path of drafts."""
        inputs = reference.fuse(own.astype(np.float64))
        for depth in range(len(path) + 1):
            out, logits = reference(np.array([*tokens[1:], *path[:depth]]), inputs)
            inputs = np.concatenate([inputs, out[-1:]])
        return np.asarray(logits)

    monkeypatch.setattr(HeadRunner, "_keep", kept)
    with LLM(
        models["target"], speculate="eagle", draft_model=models[head], num_draft_tokens=3, draft_tree=20, mode="exact",
        prefix_caching=False,
    ) as llm:  # fmt: skip
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        propose = proposer.propose

        def compare(context: DraftContext) -> Any:
            nonlocal deep
            found = propose(context)
            for index, row in enumerate(context.rows.tolist()) if found is not None else ():
                paths = list(paths_of(found, index))
                known = int(context.num_tokens[row])
                if not paths or len(compared) > 150:
                    continue
                own = np.stack([features[row, position] for position in range(known - 1)])
                for parent in {path[:-1] for path in paths}:
                    children = [path[-1] for path in paths if path[:-1] == parent]
                    logits = behind(context.token_ids[row, :known].tolist(), own, parent)
                    compared.append(children == np.argsort(-logits, kind="stable")[: len(children)].tolist())
                    deep += len(parent) > 1
            return found

        proposer.propose = compare
        llm.generate(PROMPTS, GREEDY.with_(max_tokens=12))
        assert llm.engine.ledger.totals.draft_tokens > 100
    assert len(compared) > 100 and all(compared) and deep > 20


@pytest.mark.parametrize("head", ["eagle1", "eagle3", "medusa"])
@pytest.mark.parametrize("running", test_eagle.RUNNING)
def test_text_is_the_same(models: dict[str, str], head: str, running: str) -> None:
    method = "medusa" if head == "medusa" else "eagle"
    with (
        LLM(models["target"]) as plain,
        LLM(
            models["target"], speculate=method, draft_model=models[head], num_draft_tokens=3, draft_tree=20,
            **test_eagle.RUNNING[running],
        ) as llm,
    ):  # fmt: skip
        for params in PARAMS.values():
            assert everything(llm.generate(PROMPTS, params)) == everything(plain.generate(PROMPTS, params))
        totals = llm.engine.ledger.totals
        assert totals.draft_tokens > totals.accepted_draft_tokens > 0
        assert not totals.proposers_dropped
        llm.engine.core.scheduler.check()
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        proposer.runner.check()
