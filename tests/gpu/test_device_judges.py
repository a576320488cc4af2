"""Other judges of drafts on a GPU's code: residual verification, and coins for benchmarks."""

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.autopilot.host_bound import HostBound
from headrace.sampling.residual import ResidualSampler
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [[65, 66, 67] * 4, list(range(30, 50)), [90, 3]]
PARAMS = [GREEDY.with_(temperature=0.9, top_k=40, seed=3), GREEDY, GREEDY.with_(temperature=0.8, seed=4)]
OPTIONS = {"mode": "exact", "max_model_len": 96, "max_num_batched_tokens": 64, "max_num_seqs": 4, "num_draft_tokens": 3}
DEVICE = {"device": "cuda", "kv_cache": "1MiB"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judges")
    return {
        "target": str(write_tiny_llama(folder / "target", layers=1)),
        "other": str(write_tiny_llama(folder / "other", seed=5, layers=1, hidden=32)),
    }


def run(model, params=PARAMS, **options):
    """Tokens, and (drafts verified, accepted)."""
    with LLM(model, **{**OPTIONS, **options}) as llm:
        found = [[choice.token_ids for choice in output.outputs] for output in llm.generate(PROMPTS, params)]
        llm.engine.core.scheduler.check()
        totals = llm.engine.ledger.totals
        assert not totals.proposers_dropped
        return found, (totals.draft_tokens, totals.accepted_draft_tokens), llm.engine.config.label


@pytest.mark.slow
def test_coins_fall_as_on_a_cpu(models, gpu_engine):
    """The same text, which is nobody's, and the same label; a row that the host draws for has the same coins."""
    params = [each.with_(seed=3) for each in (GREEDY, PARAMS[0], GREEDY.with_(repetition_penalty=1.2))]
    options = {"speculate": "synthetic", "synthetic_acceptance": 0.6}
    want = run(models["target"], params, device="cpu", **options)
    assert run(models["target"], params, **DEVICE, **options) == want
    assert 0 < want[1][1] < want[1][0] and "SYNTHETIC" in want[2]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "right"), [(0.0, 0.0), (1.0, 1.0)])
def test_coins_that_never_and_always_fall(models, gpu_engine, rate, right):
    _, (verified, accepted), _ = run(models["target"], speculate="synthetic", synthetic_acceptance=rate, **DEVICE)
    assert verified > 9 and accepted == right * verified


WAYS = {
    "ngram": {"speculate": "ngram"},
    "draft": {"speculate": "draft", "draft_model": "other"},
    "trees": {"speculate": "draft", "draft_model": "other", "draft_tree": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ngram", "draft", "trees"])
def test_residual_verification_as_on_a_cpu(models, gpu_engine, monkeypatch, way):
    """Both engines draft the same, by the same noise, and judge by the same coins: the texts are equal. The host sees
    every token, however slow it is beside the GPU."""
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: 3)
    options = {name: models.get(value, value) for name, value in WAYS[way].items()} | {"verify": "residual"}
    want = run(models["target"], device="cpu", **options)
    assert run(models["target"], **DEVICE, **options) == want
    assert want[1][0] > 2
    plain = run(models["target"], [GREEDY] * 3, device="cpu", speculate="off", num_draft_tokens=None)[0]
    assert run(models["target"], [GREEDY] * 3, **DEVICE, **options)[0] == plain


@pytest.mark.slow
def test_distributions_that_drafts_were_drawn_from(models, gpu_engine, monkeypatch):
    """What a network on the GPU says of its drafts is a distribution that holds them, and is handed to the judge."""
    seen, original = [], ResidualSampler.judge

    def judge(self, chosen, drawn, staged, batch, spans, drafts):
        for row in np.unique(batch.rows).tolist():
            probs, start = batch.table.draft_probs[row], int(batch.table.draft_start[row])
            for index in np.flatnonzero((batch.rows == row) & (drafts >= 0)).tolist():
                own = probs[int(batch.positions[index]) - start]
                seen.append((own.shape, float(own.sum()), float(own[drafts[index]]), int(np.count_nonzero(own))))
        return original(self, chosen, drawn, staged, batch, spans, drafts)

    monkeypatch.setattr(ResidualSampler, "judge", judge)
    params = [GREEDY.with_(temperature=0.9, top_k=7, seed=3), GREEDY.with_(temperature=0.8, top_k=7, seed=4), GREEDY]
    run(models["target"], params, speculate="draft", draft_model=models["other"], verify="residual", **DEVICE)
    assert len(seen) > 9
    for shape, whole, share, kinds in seen:
        assert shape == (260,) and abs(whole - 1) < 1e-5 and share > 0 and kinds == 7
