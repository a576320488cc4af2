"""Speculation on a GPU's code: the tokens of the CPU engine without drafts, whatever was drafted and however much of it
was right."""

import pytest

import headrace.worker.device_worker as device_worker
from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.core.drafting import FixedDepth
from headrace.sampling.params import Grammar
from headrace.spec.base import padded
from headrace.spec.combined import CombinedProposer
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90], [65, 66, 67] * 6 + [1]]
PARAMS = [
    GREEDY,
    GREEDY.with_(temperature=1.0, seed=3),
    GREEDY.with_(temperature=0.8, top_k=20, top_p=0.9, seed=4),
    GREEDY.with_(repetition_penalty=1.3, logprobs=2),
    GREEDY.with_(temperature=0.7, n=2, seed=9),
]
SMALL = {"max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 8}
DEVICE = {"device": "cuda", "mode": "exact", "kv_cache": "1MiB"}


def texts(outputs):
    return [[(choice.token_ids, choice.finish_reason) for choice in output.outputs] for output in outputs]


class Knowing:
    """A proposer that knows what is coming, and is wrong on purpose at every `wrong`-th position."""

    def __init__(self, known, num_tokens, wrong):
        self.known, self.num_tokens, self.wrong = known, num_tokens, wrong
        self.rows = {}

    def admit(self, admits):
        for admit in admits:
            prompt = tuple(admit.token_ids[: admit.prompt_len])
            self.rows[admit.row] = [*prompt, *self.known[prompt, admit.choice]]

    def release(self, rows):
        for row in rows:
            del self.rows[row]

    def propose(self, context):
        found = []
        for row, limit in zip(context.rows.tolist(), context.limits, strict=True):
            known, text = int(context.num_tokens[row]), self.rows[row]
            assert context.token_ids[row, :known].tolist() == text[:known], "the host's table has what was drawn"
            ahead = text[known : known + min(limit, self.num_tokens)]
            found.append([(t + 1) % 250 if (known + i) % self.wrong == 0 else t for i, t in enumerate(ahead)])
        return padded(found)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny"), window=20, layers=1))


@pytest.fixture(scope="module")
def expected(model):
    with LLM(model, device="cpu", mode="exact", **SMALL) as llm:
        return texts(llm.generate(PROMPTS, PARAMS))


@pytest.fixture
def knowing(monkeypatch, expected):
    """Makes every proposer one that knows the answers of PROMPTS."""
    known = {
        (tuple(prompt), index): ids
        for prompt, choices in zip(PROMPTS, expected, strict=True)
        for index, (ids, _) in enumerate(choices)
    }

    def install(num_tokens, wrong):
        proposer = Knowing(known, num_tokens, wrong)
        made = CombinedProposer([("ngram", proposer)])
        monkeypatch.setattr(device_worker, "make_device_proposer", lambda *rest: made)
        return proposer

    return install


def drafted(llm):
    """(drafts verified, accepted) so far."""
    return llm.engine.ledger.totals.draft_tokens, llm.engine.ledger.totals.accepted_draft_tokens


def test_drafts_that_are_sometimes_right(model, gpu_engine, knowing, expected):
    knowing(4, 3)
    chosen = [0, 1, 3]
    with LLM(model, speculate="ngram", num_draft_tokens=4, **DEVICE, **SMALL) as llm:
        found = texts(llm.generate([PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen]))
        assert found == [expected[i] for i in chosen]
        verified, right = drafted(llm)
        assert 0 < 0.3 * verified < right < verified
        llm.engine.core.scheduler.check()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [1, 3, 1000], ids=["all wrong", "some wrong", "all right"])
def test_drafts_change_nothing_however_right_they_are(model, gpu_engine, knowing, expected, wrong):
    knowing(4, wrong)
    with LLM(model, speculate="ngram", num_draft_tokens=4, **DEVICE, **SMALL) as llm:
        assert texts(llm.generate(PROMPTS, PARAMS)) == expected
        verified, right = drafted(llm)
        assert verified > 30, "there were drafts"
        assert right == 0 if wrong == 1 else right > verified * (0.3 if wrong == 3 else 0.9)
        # prompts and answers are in the prefix cache now
        assert texts(llm.generate(PROMPTS, PARAMS)) == expected
        llm.engine.core.scheduler.check()


@pytest.mark.slow
def test_memory_pressure_steps_in_flight_and_no_padding(model, gpu_engine, knowing, expected):
    knowing(3, 4)
    # 10 blocks of 16 tokens: rows are preempted and computed again
    options = DEVICE | SMALL | {"kv_cache": 10 * 16 * 2 * 2 * 12 * 4, "max_model_len": 96}
    for more in ({"cuda_graphs": False}, {"steps_in_flight": 3}):
        with LLM(model, speculate="ngram", num_draft_tokens=3, **options, **more) as llm:
            assert texts(llm.generate(PROMPTS, PARAMS)) == expected
            assert drafted(llm)[1] > 10
            llm.engine.core.scheduler.check()


@pytest.mark.slow
def test_rows_that_the_host_draws_for_and_rows_that_decline(model, gpu_engine):
    params = [
        GREEDY.with_(allowed_token_ids=(70, 71, 72), max_tokens=30),  # falls into loops, which a look-up foresees
        GREEDY.with_(draft_tokens=0, temperature=0.9, seed=1),
        GREEDY.with_(grammar=Grammar("regex", "[a-f]{3,30}x"), ignore_eos=False),
        GREEDY.with_(beam_width=2, n=1, max_tokens=4),
        GREEDY.with_(stop_token_ids=tuple(range(0, 250, 3)), min_tokens=4),
    ]
    with LLM(model, device="cpu", mode="exact", **SMALL) as llm:
        want = texts(llm.generate(PROMPTS, params))
    for speculate in ("suffix", "auto"):
        with LLM(model, speculate=speculate, **DEVICE, **SMALL) as llm:
            assert texts(llm.generate(PROMPTS, params)) == want
            assert speculate == "auto" or drafted(llm)[1] > 10
            llm.engine.core.scheduler.check()


@pytest.mark.slow
def test_aborts_leave_nothing_behind(model, gpu_engine, knowing, expected):
    knowing(4, 1000)
    with LLM(model, speculate="ngram", num_draft_tokens=4, **DEVICE, **SMALL) as llm:
        first, second = (llm.engine.submit(PROMPTS[i], PARAMS[i]) for i in range(2))
        while len(first.outputs[0].token_ids) < 3:
            llm.engine.step()
        llm.engine.abort(first)
        again = llm.engine.submit(PROMPTS[0], PARAMS[0])  # in the row that was given up, whose drafts were never judged
        while llm.engine.has_work:
            llm.engine.step()
        assert texts([again, second]) == expected[:2]
        llm.engine.core.scheduler.check()


def test_what_a_gpu_cannot_verify_yet_is_said(model, gpu_engine):
    with pytest.raises(ConfigError, match="leave out draft_tree or invariant"):
        LLM(model, device="cuda", speculate="ngram", draft_tree=8, invariant=True)


@pytest.mark.slow
def test_between_drafts_and_steps_that_overlap(model, gpu_engine, knowing, expected):
    """Changes of the way, every few steps: rows run ahead, are waited for, and change hands in between."""
    knowing(4, 3)
    with LLM(model, speculate="ngram", **DEVICE, **SMALL) as llm:
        policy, ways = llm.engine.core.scheduler.drafting, []

        def change(plan, result):
            ways.append(policy.speculates)
            policy._wanted = len(ways) // 3 % 2 == 0

        policy._policy, policy.observe_step = FixedDepth(4), change
        chosen = [0, 1, 3, 0, 1]
        found = texts(llm.generate([PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen]))
        assert found == [expected[i] for i in chosen]
        assert 3 < sum(ways) < len(ways) - 3 and drafted(llm)[1] > 3
        llm.engine.core.scheduler.check()
