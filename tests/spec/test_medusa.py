"""Medusa heads: the published layout on tiny random weights, against the arithmetic written out; and the engine."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.loading.errors import CheckpointError
from headrace.spec.state_heads import StateRunner
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.with_(temperature=0.8, seed=3)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]
HIDDEN, VOCAB, HEADS = 48, 260, 3


def write_heads(folder, prefix="", hidden=HIDDEN, said=HEADS):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    tensors = {}
    for head in range(HEADS):
        for name, shape in (
            ("0.linear.weight", (hidden, hidden)),
            ("0.linear.bias", (hidden,)),
            ("1.weight", (VOCAB, hidden)),
        ):
            tensors[f"{prefix}{head}.{name}"] = (rng.standard_normal(shape) * 0.2).astype(np.float32)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": said, "medusa_num_layers": 1}))
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("medusa")
    return {
        "target": str(write_tiny_llama(folder / "target")),
        "heads": write_heads(folder / "heads"),
        "named": write_heads(folder / "named", prefix="medusa_head."),
        "folder": folder,
    }


def everything(outputs):
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in o.outputs] for o in outputs]


@pytest.mark.parametrize("heads", ["heads", "named"])
def test_drafts_are_the_best_tokens_of_each_head(models, heads, monkeypatch):
    tensors = {
        name.removeprefix("medusa_head."): each
        for name, each in load_file(f"{models[heads]}/medusa_lm_head.safetensors").items()
    }
    states, compared = {}, []
    keep = StateRunner._keep

    def kept(self, step):
        for row, start, first, end in zip(step.rows, step.starts, step.query_start, step.query_start[1:], strict=False):
            states.update({(int(row), int(start) + i): np.array(step.values[first + i]) for i in range(end - first)})
        keep(self, step)

    monkeypatch.setattr(StateRunner, "_keep", kept)
    with LLM(models["target"], speculate="medusa", draft_model=models[heads], num_draft_tokens=8, mode="exact") as llm:
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        propose = proposer.propose

        def compare(context):
            found = propose(context)
            for index, row in enumerate(context.rows.tolist() if found is not None else ()):
                x = states[row, int(context.num_tokens[row]) - 2]
                wanted = []
                for head in range(HEADS):
                    y = tensors[f"{head}.0.linear.weight"] @ x + tensors[f"{head}.0.linear.bias"]
                    wanted.append(int(np.argmax(tensors[f"{head}.1.weight"] @ (x + y / (1 + np.exp(-y))))))
                compared.append(found.tokens[index].tolist() == wanted)
            return found

        proposer.propose = compare
        llm.generate(PROMPTS, GREEDY)
    assert len(compared) > 100 and all(compared)


@pytest.mark.parametrize(
    "running",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 6},
        {"kv_cache": 39 * 4 * 192, "block_size": 4, "max_num_seqs": 6, "max_model_len": 90},
    ],
    ids=["plain", "chunks", "memory pressure"],
)
def test_text_is_the_same(models, running):
    with (
        LLM(models["target"]) as plain,
        LLM(models["target"], speculate="medusa", draft_model=models["heads"], num_draft_tokens=3, **running) as llm,
    ):
        for params in (
            GREEDY,
            SAMPLED,
            SAMPLED.with_(n=3, logprobs=2, repetition_penalty=1.2),
            SAMPLED.with_(stop=("a",)),
        ):
            for _ in range(2):
                assert everything(llm.generate(PROMPTS, params)) == everything(plain.generate(PROMPTS, params))
        few = SAMPLED.with_(allowed_token_ids=(70, 71, 72))
        assert everything(llm.generate(PROMPTS, few)) == everything(plain.generate(PROMPTS, few))
        totals = llm.engine.ledger.totals
        assert totals.draft_tokens > totals.accepted_draft_tokens > 0 and not totals.proposers_dropped
        llm.engine.core.scheduler.check()


def test_with_residual_verification_and_with_auto(models):
    for options in ({"verify": "residual", "speculate": "medusa"}, {"speculate": "auto"}):
        with LLM(models["target"], draft_model=models["heads"], **options) as llm:
            assert "medusa" in llm.engine.config.proposers
            llm.generate(PROMPTS, SAMPLED)
            assert not llm.engine.ledger.totals.proposers_dropped


CHOICES = [[0], [1], [7], [0, 0], [0, 3], [1, 0], [0, 0, 0], [0, 0, 1], [7, 0, 2]]


def chosen(models, choices):
    """A folder of heads with a tree of fixed shape."""
    folder = Path(write_heads(models["folder"] / f"choices {len(str(choices))}"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "medusa_choices": choices}))
    return str(folder)


def test_a_tree_of_fixed_shape(models):
    """Its nodes are those that the ranks name; the text is the same, greedy and sampled."""
    heads, shapes = chosen(models, CHOICES), []
    closed = {tuple(path[: end + 1]) for path in CHOICES for end in range(len(path))}
    with (
        LLM(models["target"]) as plain,
        LLM(models["target"], speculate="medusa", draft_model=heads, num_draft_tokens=3, draft_tree=32) as llm,
    ):
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        propose, candidates, ranked = proposer.propose, proposer._candidates, []
        proposer._candidates = lambda *arguments: ranked.append(candidates(*arguments)) or ranked[-1]

        def watched(context):
            ranked.clear()
            found = propose(context)
            for row in range(len(context.rows)) if found is not None and len(context.rows) == 1 else ():
                paths = []
                for token, parent in zip(found.tokens[row].tolist(), found.tree[row].tolist(), strict=True):
                    paths.append((*(paths[parent] if parent >= 0 else ()), token))
                order = [ids[0].tolist() for ids, _ in ranked]
                shapes.append({tuple(order[at].index(token) for at, token in enumerate(path)) for path in paths})
            return found

        proposer.propose = watched
        for params in (GREEDY, SAMPLED, SAMPLED.with_(n=3, logprobs=2, repetition_penalty=1.2)):
            assert everything(llm.generate(PROMPTS, params)) == everything(plain.generate(PROMPTS, params))
        assert everything(llm.generate(PROMPTS[:1], GREEDY)) == everything(plain.generate(PROMPTS[:1], GREEDY))
        assert not llm.engine.ledger.totals.proposers_dropped
        llm.engine.core.scheduler.check()
    whole = [shape for shape in shapes if max(map(len, shape)) == 3]
    assert len(whole) > 20 and all(shape == closed for shape in whole)


@pytest.mark.parametrize("choices", [5, [[0], 1], [[]], [[-1]], [[0, 0, 0, 0]], [[99]]])
def test_odd_shapes_are_refused(models, choices):
    with pytest.raises(CheckpointError, match="must be lists of 1 to 3 ranks"):
        LLM(models["target"], speculate="medusa", draft_model=chosen(models, choices), draft_tree=8)
    shutil.rmtree(models["folder"] / f"choices {len(str(choices))}")


def test_what_does_not_fit_is_refused(models):
    folder = models["folder"]
    with pytest.raises(ValueError, match="expected"):
        LLM(models["target"], speculate="medusa", draft_model=write_heads(folder / "narrow", hidden=32))
    with pytest.raises(CheckpointError, match="says medusa_num_heads 5, the file has 3"):
        LLM(models["target"], speculate="medusa", draft_model=write_heads(folder / "lying", said=5))
    with pytest.raises(ValueError, match="is Medusa heads; give speculate=medusa"):
        LLM(models["target"], speculate="eagle", draft_model=models["heads"])
