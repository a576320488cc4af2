"""Rejection sampling along token trees: the distribution of what comes out, under every logits stage and by every
proposer that makes trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.sampling.residual import ResidualSampler, coins, distribution
from headrace.sampling.sampler import Sampler
from headrace.sampling.state import SamplingBatch, TreeRows
from spec import test_eagle, test_medusa
from spec.test_residual import ALL, COUNT, PROMPT, STAGES, VOCAB, Rows, counted, expected, misfit, of_model
from tiny import write_tiny_llama

Tree = tuple[list[int], list[int]]  # tokens of nodes, and their parents: -1 the last known token


def of_network(rows: Rows, model: Any) -> list[Tree]:
    """Of each row the best three tokens of a drafting model, and behind the best two of these the best two."""
    sampler, trees = Sampler(), []
    batch = rows.batch(ALL[:1], 0)  # what a network drafts is the same for all: they have said the same
    _, _, staged = sampler.draw(model[tuple(rows.said(ALL[:1]))], batch)
    first = np.argsort(-staged[0], kind="stable")[:3].tolist()
    tokens, parents = list(first), [-1, -1, -1]
    for place, token in enumerate(first[:2]):
        rows.tokens[0, len(PROMPT)] = token
        _, _, staged = sampler.draw(model[tuple(rows.said(ALL[:1]))], rows.batch(ALL[:1], 1))
        tokens += np.argsort(-staged[0], kind="stable")[:2].tolist()
        parents += [place, place]
        rows.forget()
    trees = [(tokens, parents)] * COUNT
    return trees


def looked_up(rows: Rows, model: Any) -> list[Tree]:
    """What a look-up offers: some tokens, likely or not."""
    return [([1, 4, 2, 0, 1], [-1, -1, 0, 0, 1])] * COUNT


def at_random(rows: Rows, model: Any) -> list[Tree]:
    """Trees of each row's own."""
    rng, trees = np.random.default_rng(5), []
    for _ in ALL:
        first = rng.permutation(VOCAB)[: rng.integers(1, 4)].tolist()
        second = rng.permutation(VOCAB)[: rng.integers(0, 4)].tolist()
        trees.append((first + second, [-1] * len(first) + [int(rng.integers(len(first)))] * len(second)))
    return trees


def verified(rows: Rows, model: Any, sampler: Sampler, trees: list[Tree]) -> np.ndarray:
    """int [COUNT, 3]: the first two tokens of each request, and the third where it came: trees judged once, the rest
    drawn plainly."""
    spans, positions, parents, tokens, logits = [], [], [], [], []
    for row, (nodes, above) in enumerate(trees):
        first, depths = len(spans), [0]
        for place, (node, parent) in enumerate(zip([-1, *nodes], [-2, *above], strict=True)):
            if place:
                depths.append(depths[parent + 1] + 1)
            path, at = [], place
            while at:
                path.insert(0, nodes[at - 1])
                at = above[at - 1] + 1
            logits.append(model[tuple([*path, VOCAB, VOCAB][:2])])
            spans.append(row)
            positions.append(len(PROMPT) + depths[place])
            parents.append(-1 if not place else first + parent + 1)
            tokens.append(node)
    at = np.array(spans, np.int32)
    trees_of = TreeRows(np.array(parents, np.int32), np.array(tokens, np.int32))
    batch = SamplingBatch(rows.table, at, np.array(positions, np.int32), rows.tokens, trees=trees_of)
    sampled = sampler.sample(np.stack(logits), batch, at, COUNT, np.full(len(at), -1, np.int32))
    assert not sampled.errors
    found = np.full((COUNT, 3), -1)
    found[:, : sampled.tokens.shape[1]] = sampled.tokens
    rest = np.flatnonzero(found[:, 1] < 0)
    rows.forget()
    rows.tokens[:, len(PROMPT)] = found[:, 0]
    chosen, _, _ = sampler.draw(model[tuple(rows.said(rest))], rows.batch(rest, 1))
    found[rest, 1] = chosen
    rows.forget()
    return found


@pytest.mark.parametrize(
    ("name", "propose"),
    [*((name, each) for name in STAGES for each in (of_network, looked_up)), ("plain", at_random), ("bias", at_random)],
)
def test_the_distribution_is_that_without_drafts(name: str, propose: Any) -> None:
    target, other = of_model(1), of_model(2)
    rows = Rows(STAGES[name])
    tokens = verified(rows, target, ResidualSampler(), propose(rows, 0.7 * target + 0.3 * other))
    chi_square, variation = misfit(counted(tokens), expected(STAGES[name], target))
    assert chi_square < 1 and variation < 0.04


def test_as_much_is_accepted_as_the_candidates_hold() -> None:
    target = of_model(1)
    rows = Rows({})
    trees = of_network(rows, target)
    tokens = verified(rows, target, ResidualSampler(), trees)
    best = trees[0][0][:3]
    p = distribution(target[VOCAB, VOCAB].astype(np.float64))
    assert np.isin(tokens[:, 0], best).mean() == pytest.approx(p[best].sum(), abs=0.03)
    complete = tokens[tokens[:, 2] >= 0]
    assert len(complete) > COUNT / 10
    wanted = np.stack([distribution(row) for row in target[complete[:, 0], complete[:, 1]].astype(np.float64)]).mean(0)
    assert misfit(np.bincount(complete[:, 2], minlength=VOCAB), wanted)[0] < 1, "the token behind a whole path"


class Whole(ResidualSampler):
    """Tries each candidate against the whole distribution, not against what is left of it."""

    def judge(self, chosen: Any, drawn: Any, staged: Any, batch: Any, spans: Any, drafts: Any) -> Any:
        tokens = chosen.copy()
        for index in np.flatnonzero(batch.trees.parents == -1).tolist():
            below = np.flatnonzero(batch.trees.parents == index)
            chances = coins(batch, np.full(len(below), index), np.arange(len(below)))
            probs = distribution(np.asarray(staged[index], np.float64))
            for child, chance in zip(below.tolist(), chances.tolist(), strict=True):
                if chance < probs[batch.trees.tokens[child]]:
                    tokens[index] = batch.trees.tokens[child]
                    break
        return tokens, np.zeros(len(tokens), bool)


def test_the_test_finds_a_wrong_verifier() -> None:
    target = of_model(1)
    rows = Rows({})
    tokens = verified(rows, target, Whole(), looked_up(rows, target))
    assert misfit(counted(tokens), expected({}, target))[0] > 3


def test_greedy_rows_know_no_chance() -> None:
    target = of_model(1)
    rows = Rows({"temperature": 0.0})
    trees = of_network(rows, target)
    plain, judged = (verified(rows, target, sampler, trees) for sampler in (Sampler(), ResidualSampler()))
    assert (plain == judged).all() and (judged[:, 2] >= 0).all()


def test_coins_of_one_position_are_independent_of_each_other() -> None:
    rows = Rows({})
    first, second = (coins(rows.batch(ALL, 0), ALL, turn) for turn in range(2))
    assert misfit(np.bincount((second * 10).astype(int), minlength=10), np.full(10, 0.1))[0] < 1
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


# -- through the whole engine

ALLOWED = (65, 66, 67)
SAMPLED = SamplingParams(temperature=1.0, allowed_token_ids=ALLOWED, max_tokens=4, ignore_eos=True, n=120, seed=0)
WAYS: dict[str, dict[str, Any]] = {
    "ngram": {"speculate": "ngram"},
    "suffix": {"speculate": "suffix"},
    "draft": {"speculate": "draft", "draft_model": "draft"},
    "eagle": {"speculate": "eagle", "draft_model": "eagle"},
    "medusa": {"speculate": "medusa", "draft_model": "medusa"},
    "merged": {"speculate": "auto", "draft_model": "draft"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("residual-trees")
    return {
        "target": str(write_tiny_llama(folder / "target")),
        "draft": str(write_tiny_llama(folder / "draft", layers=1)),
        "eagle": test_eagle.write_head(folder / "eagle", 1),
        "medusa": test_medusa.write_heads(folder / "medusa"),
    }


def last_three(llm: LLM) -> np.ndarray:
    """How often each of the 27 endings comes in answers of different seeds and choices."""
    seen = np.zeros(27, int)
    for seed in range(12):
        (output,) = llm.generate([[65, 66, 67, 65, 66, 67, 65, 66]], SAMPLED.with_(seed=seed))
        for choice in output.outputs:
            a, b, c = (ALLOWED.index(token) for token in choice.token_ids[1:])
            seen[9 * a + 3 * b + c] += 1
    return seen


@pytest.fixture(scope="module")
def reference(folders: dict[str, str]) -> np.ndarray:
    with LLM(folders["target"]) as plain:
        return last_three(plain)


@pytest.mark.parametrize("way", WAYS)
def test_engine_draws_what_the_model_would(folders: dict[str, str], reference: np.ndarray, way: str) -> None:
    options = dict(WAYS[way])
    if "draft_model" in options:
        options["draft_model"] = folders[options["draft_model"]]
    with LLM(folders["target"], verify="residual", num_draft_tokens=3, draft_tree=8, **options) as llm:
        found = last_three(llm)
        totals = llm.engine.ledger.totals
        assert 0 < totals.accepted_draft_tokens < totals.draft_tokens and not totals.proposers_dropped
        llm.engine.core.scheduler.check()
    both = reference + found
    keep = both >= 10
    statistic = ((reference - found)[keep] ** 2 / both[keep]).sum()  # two samples of one size
    degrees = keep.sum() - 1
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.29 * np.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("way", ["suffix", "draft", "medusa"])
def test_greedy_text_is_the_same_under_pressure(folders: dict[str, str], way: str) -> None:
    """Chunks, preemptions and choices; the text of greedy requests has no other distribution."""
    options = dict(WAYS[way])
    if "draft_model" in options:
        options["draft_model"] = folders[options["draft_model"]]
    prompts = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, allowed_token_ids=(70, 71, 72, 73), n=2)
    running = {"kv_cache": 39 * 4 * 192, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 17}
    with (
        LLM(folders["target"], max_model_len=90) as plain,
        LLM(
            folders["target"], verify="residual", num_draft_tokens=3, draft_tree=12, max_model_len=90,
            **running, **options,
        ) as llm,
    ):  # fmt: skip
        wanted, found = (each.generate(prompts, params) for each in (plain, llm))
        assert [[c.token_ids for c in o.outputs] for o in found] == [[c.token_ids for c in o.outputs] for o in wanted]
        assert llm.engine.ledger.totals.accepted_draft_tokens > 0
        llm.engine.core.scheduler.check()
