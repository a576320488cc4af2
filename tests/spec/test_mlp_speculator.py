"""MLP speculators: the published layout on tiny random weights, against the arithmetic written out; and the engine."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.loading.errors import CheckpointError
from headrace.spec.state_heads import StateRunner
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.with_(temperature=0.8, seed=3)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]
HIDDEN, INNER, VOCAB, HEADS = 48, 32, 260, 3


def write_speculator(folder, *, tied=False, scaled=True, hidden=HIDDEN, copies=False, **changes):
    """`tied`: heads share what they may; `copies`: and are written all the same."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)

    def random(*shape):
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)

    tensors, first = {}, {}
    for head in range(HEADS):
        for name, shape, shared_from in (
            ("emb.{}.weight", (VOCAB, INNER), 0),
            ("proj.{}.weight", (INNER, INNER if head else hidden), 1),
            ("ln.{}.weight", (INNER,), 0),
            ("ln.{}.bias", (INNER,), 0),
            ("head.{}.weight", (VOCAB, INNER), 0),
        ):
            if tied and head > shared_from:
                if copies:
                    tensors["speculator." + name.format(head)] = first[name].copy()
                continue
            first[name] = random(*shape) + (1 if name == "ln.{}.weight" else 0)
            tensors["speculator." + name.format(head)] = first[name]
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": HEADS,
        "emb_dim": hidden, "inner_dim": INNER, "vocab_size": VOCAB, "scale_input": scaled, "tie_weights": tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    return {
        "target": str(write_tiny_llama(folder / "target")),
        "own": write_speculator(folder / "own"),
        "tied": write_speculator(folder / "tied", tied=True, scaled=False),
        "copies": write_speculator(folder / "copies", tied=True, copies=True),
        "folder": folder,
    }


def reference(path, state, token, scaled):
    """The greedy drafts behind a token, from the hidden state before it."""
    tensors = {
        name.removeprefix("speculator."): each.astype(np.float64)
        for name, each in load_file(f"{path}/model.safetensors").items()
    }

    def own(name, head, first=0):
        while name.format(head) not in tensors:
            head -= 1
        return tensors[name.format(head)]

    def normed(x):
        return x / np.sqrt((x * x).mean() + 1e-6)

    fade = 0.5 ** (0.5 / HEADS)
    weight = math.sqrt((1 - fade**2) * (INNER / 2)) / fade
    x = normed(state) / math.sqrt(2) if scaled else state.astype(np.float64)
    drafts = []
    for head in range(HEADS):
        x = own("proj.{}.weight", head) @ x + weight * own("emb.{}.weight", head)[token]
        x = normed(x) * own("ln.{}.weight", head) + own("ln.{}.bias", head)
        x = np.array([value / 2 * (1 + math.erf(value / math.sqrt(2))) for value in x])
        token = int(np.argmax(own("head.{}.weight", head) @ x))
        drafts.append(token)
    return drafts


@pytest.mark.parametrize(("heads", "scaled"), [("own", True), ("tied", False), ("copies", True)])
def test_drafts_are_those_of_the_reference(models, heads, scaled, monkeypatch):
    states, compared = {}, []
    keep = StateRunner._keep

    def kept(self, step):
        for row, start, first, end in zip(step.rows, step.starts, step.query_start, step.query_start[1:], strict=False):
            states.update({(int(row), int(start) + i): np.array(step.values[first + i]) for i in range(end - first)})
        keep(self, step)

    monkeypatch.setattr(StateRunner, "_keep", kept)
    with LLM(models["target"], speculate="mlp", draft_model=models[heads], num_draft_tokens=8, mode="exact") as llm:
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        propose = proposer.propose

        def compare(context):
            found = propose(context)
            for index, row in enumerate(context.rows.tolist() if found is not None else ()):
                drafts = [token for token in found.tokens[index].tolist() if token >= 0]
                known = int(context.num_tokens[row])
                wanted = reference(models[heads], states[row, known - 2], context.token_ids[row, known - 1], scaled)
                compared.append(drafts == wanted[: len(drafts)])
            return found

        proposer.propose = compare
        llm.generate(PROMPTS, GREEDY)
    assert len(compared) > 100 and all(compared)


def everything(outputs):
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in o.outputs] for o in outputs]


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
        LLM(models["target"], speculate="mlp", draft_model=models["own"], num_draft_tokens=3, **running) as llm,
    ):
        for params in (
            GREEDY,
            SAMPLED,
            SAMPLED.with_(n=3, logprobs=2, repetition_penalty=1.2),
            SAMPLED.with_(stop=("a",)),
            SAMPLED.with_(allowed_token_ids=(70, 71, 72)),
        ):
            for _ in range(2):
                assert everything(llm.generate(PROMPTS, params)) == everything(plain.generate(PROMPTS, params))
        totals = llm.engine.ledger.totals
        assert totals.draft_tokens > totals.accepted_draft_tokens > 0 and not totals.proposers_dropped
        llm.engine.core.scheduler.check()


def test_with_residual_verification_and_with_auto(models):
    for options in ({"verify": "residual", "speculate": "mlp"}, {"speculate": "auto"}):
        with LLM(models["target"], draft_model=models["tied"], **options) as llm:
            assert "mlp" in llm.engine.config.proposers
            llm.generate(PROMPTS, SAMPLED)
            assert not llm.engine.ledger.totals.proposers_dropped


def test_what_does_not_fit_is_refused(models):
    narrow = write_speculator(models["folder"] / "narrow", hidden=32)
    with pytest.raises(ValueError, match="reads states of 32 numbers, not of 48"):
        LLM(models["target"], speculate="mlp", draft_model=narrow)
    wrong = write_speculator(models["folder"] / "wrong", n_predict=0)
    with pytest.raises(CheckpointError, match="n_predict must be a positive integer"):
        LLM(models["target"], speculate="mlp", draft_model=wrong)
    more = write_speculator(models["folder"] / "more", n_predict=2)
    with pytest.raises(ValueError, match=r"not part of this model: emb\.2\.weight"):
        LLM(models["target"], speculate="mlp", draft_model=more)
    with pytest.raises(ConfigError, match="is an MLP speculator; give speculate=mlp"):
        LLM(models["target"], speculate="eagle", draft_model=models["own"])
