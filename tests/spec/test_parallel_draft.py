"""Parallel drafts (PARD): a tiny model that guesses all tokens of a draft at once, against transformers; the engine."""

import json

import pytest

from headrace import LLM, SamplingParams
from headrace.loading.errors import CheckpointError
from headrace.sampling.params import Grammar
from headrace.spec.parallel_draft import ParallelDraftRunner
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.with_(temperature=0.8, seed=3)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]
MASK = 7


def write_draft(folder, token=MASK, key="pard_token", **options):
    write_tiny_llama(folder, **options)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: token}))
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pard")
    return {
        "target": str(write_tiny_llama(folder / "target")),
        "twin": write_draft(folder / "twin"),  # the target's own weights: its first guess is always right
        "other": write_draft(folder / "other", key="ptd_token_id", seed=4, layers=1),
        "windowed": write_draft(folder / "windowed", seed=4, window=9),
        "folder": folder,
    }


@pytest.mark.parametrize("draft", ["other", "windowed"])
def test_drafts_are_those_of_one_pass_over_masks(models, draft):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(models[draft], dtype=torch.float32)
    compared = []
    with LLM(models["target"], speculate="draft", draft_model=models[draft], num_draft_tokens=4, mode="exact") as llm:
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        assert isinstance(proposer.runner, ParallelDraftRunner)
        propose = proposer.propose

        def compare(context):
            found = propose(context)
            for index, row in enumerate(context.rows.tolist() if found is not None else ()):
                drafts = [token for token in found.tokens[index].tolist() if token >= 0]
                if not drafts or len(compared) > 60:
                    continue
                known = context.token_ids[row, : int(context.num_tokens[row])].tolist()
                with torch.no_grad():
                    logits = model(torch.tensor([known + [MASK] * (len(drafts) - 1)])).logits[0, len(known) - 1 :]
                compared.append(drafts == logits.argmax(-1).tolist())
            return found

        proposer.propose = compare
        llm.generate(PROMPTS, GREEDY)
    assert len(compared) > 50 and all(compared)


def everything(outputs):
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in o.outputs] for o in outputs]


@pytest.mark.parametrize(
    "running",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 6},
        {"kv_cache": 39 * 4 * 192, "block_size": 4, "max_num_seqs": 6, "max_model_len": 90},
        {"prefix_caching": False},
    ],
    ids=["plain", "chunks", "memory pressure", "no prefix cache"],
)
def test_text_is_the_same(models, running):
    with (
        LLM(models["target"]) as plain,
        LLM(models["target"], speculate="draft", draft_model=models["twin"], num_draft_tokens=4, **running) as llm,
    ):
        for params in (
            GREEDY,
            SAMPLED,
            SAMPLED.with_(n=3, logprobs=2, repetition_penalty=1.2),
            SAMPLED.with_(stop=("a", "Q"), stop_token_ids=tuple(range(0, 200, 7)), min_tokens=5),
            SAMPLED.with_(allowed_token_ids=(70, 71, 72)),
            SAMPLED.with_(grammar=Grammar("regex", "[a-f]{3,30}x"), ignore_eos=False),
        ):
            for _ in range(2):  # the second time the draft model finds prompts in its own prefix cache
                assert everything(llm.generate(PROMPTS, params)) == everything(plain.generate(PROMPTS, params))
        totals = llm.engine.ledger.totals
        assert totals.draft_tokens > totals.accepted_draft_tokens > 0 and not totals.proposers_dropped
        llm.engine.core.scheduler.check()
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        proposer.runner.check()


def test_the_first_guess_of_the_model_itself_is_right(models):
    with LLM(models["target"], speculate="draft", draft_model=models["twin"], num_draft_tokens=4, mode="exact") as llm:
        llm.generate(PROMPTS, SAMPLED)
        verified, accepted = llm.engine.ledger.totals.draft_positions[0]
        assert accepted == verified > 20


def test_with_residual_verification_and_with_auto(models):
    for options in ({"verify": "residual", "speculate": "draft"}, {"speculate": "auto"}):
        with LLM(models["target"], draft_model=models["other"], **options) as llm:
            llm.generate(PROMPTS, SAMPLED)
            assert not llm.engine.ledger.totals.proposers_dropped


def test_a_mask_token_that_cannot_be_is_refused(models):
    far = write_draft(models["folder"] / "far", token=5000)
    with pytest.raises(ValueError, match="the mask token 5000 is not one of the 260 of the draft model"):
        LLM(models["target"], speculate="draft", draft_model=far)
    wrong = write_draft(models["folder"] / "wrong", token="<mask>")
    with pytest.raises(CheckpointError, match="pard_token must be a token id, not '<mask>'"):
        LLM(models["target"], speculate="draft", draft_model=wrong)
