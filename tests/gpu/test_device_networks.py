"""Networks that draft on a GPU's code: the drafts of the CPU engine, token for token, and the same text as without."""

import sys
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.autopilot.host_bound import HostBound
from headrace.core.drafting import FixedDepth
from headrace.core.kv_manager import GONE
from headrace.ops.triton.runtime import INTERPRETED
from headrace.worker.device_chain import ChainRunner
from headrace.worker.device_networks import DeviceDraftRunner
from headrace.worker.graphs import GraphLauncher, Graphs
from headrace.worker.table import RequestTable
from tiny import write_tiny_llama

sys.path.insert(0, str(Path(__file__).parent.parent / "spec"))
from test_eagle import drafts_by_place, write_head
from test_mtp import write_model

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [[65, 66, 67] * 4, list(range(30, 70)), [90, 3]]
PARAMS = [GREEDY, GREEDY.with_(temperature=0.9, seed=3), GREEDY.with_(temperature=0.8, seed=4, max_tokens=6)]
OPTIONS = {"mode": "exact", "max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_draft_tokens": 3}
DEVICE = {"device": "cuda", "kv_cache": "1MiB"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks")
    target = str(write_tiny_llama(folder / "target", layers=2))
    return {
        "target": target,
        "twin": target,
        "other": str(write_tiny_llama(folder / "other", seed=5, layers=1, hidden=32)),
        "windowed": str(write_tiny_llama(folder / "windowed", layers=2, window=9)),
        "eagle1": write_head(folder / "one", 1),
        "eagle3": write_head(folder / "three", 3),
        "mtp": str(write_model(folder / "mtp", "deepseek")),
        "deep": str(write_tiny_llama(folder / "deep", layers=4)),
    }


@pytest.fixture
def held(monkeypatch):
    """Every draft that an engine holds, in order; the host sees all of them, since no step runs several times."""
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: 1)
    drafts = []
    original = RequestTable.hold_drafts

    def hold(self, rows, found):
        if found is not None:
            drafts.extend(zip(rows.tolist(), found.tokens.tolist(), strict=True))
        return original(self, rows, found)

    monkeypatch.setattr(RequestTable, "hold_drafts", hold)
    return drafts


def tokens(outputs):
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def run(model, params=PARAMS, prompts=PROMPTS, **options):
    """Tokens, and (drafts verified, accepted)."""
    with LLM(model, **{**OPTIONS, **options}) as llm:
        told = [choice.option for choice in llm.engine.choices]
        drafts_by_model = options["speculate"] in ("draft", "auto") and options["device"] == "cuda"
        assert ("draft_step_kernel" in told) == drafts_by_model
        found = tokens(llm.generate(prompts, params))
        llm.engine.core.scheduler.check()
        for proposer in llm.engine._worker.proposer._proposers.values():
            getattr(proposer, "runner", llm.engine.core.scheduler).check()
        totals = llm.engine.ledger.totals
        return found, (totals.draft_tokens, totals.accepted_draft_tokens)


def compare(target, held, params, prompts, **options):
    """(drafts verified, accepted), which are the same on both."""
    want, counts = run(target, params, prompts, device="cpu", **options)
    there = held.copy()
    held.clear()
    found, on_gpu = run(target, params, prompts, **DEVICE, **options)
    assert found == want and on_gpu == counts and counts[0] > 5
    assert held == there
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name"), [("eagle", "eagle1"), ("draft", "other")])
def test_drafts_are_those_of_the_cpu(models, gpu_engine, held, monkeypatch, method, name):
    chains, original = [], ChainRunner._chain
    monkeypatch.setattr(ChainRunner, "_chain", lambda self, key: (chains.append(key), original(self, key)))
    params = [each.with_(max_tokens=5 if name == "eagle1" else 13) for each in PARAMS[:2]]
    compare(models["target"], held, params, PROMPTS[1:], speculate=method, draft_model=models[name])
    if INTERPRETED:  # else so few of a kind may not have been worth a graph
        assert len(chains) > 3 and max(key.depth for key in chains) == 3, "all passes of a draft ran as one"
        assert sum(key.behind for key in chains) > 1, "most of them before the host knew what was accepted"


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU chains are captured")
def test_a_capture_leaves_what_a_chain_begins_with(models, gpu_engine, held, monkeypatch):
    """What a capture does before a chain runs, a chain of padding, happens before every one."""

    def serves(graphs, key):
        graphs._idle(key)
        graphs._body(key)
        return True

    monkeypatch.setattr(Graphs, "serves", serves)
    params = PARAMS[0].with_(max_tokens=4)
    compare(models["target"], held, params, PROMPTS[1:], speculate="eagle", draft_model=models["eagle1"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["twin", "eagle1", "eagle3"])
def test_drafts_of_more_kinds(models, gpu_engine, held, name):
    options = {"speculate": "draft" if name == "twin" else "eagle", "draft_model": models[name]}
    target = models["deep" if name == "eagle3" else "target"]
    verified, right = compare(target, held, PARAMS, PROMPTS, **options)
    assert name != "twin" or right == verified, "the model itself is always right, sampled drafts too"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["other", "windowed", "eagle1"])
def test_company_and_memory_pressure_change_nothing(models, gpu_engine, name):
    prompts = [*PROMPTS, PROMPTS[1], [5] * 20]
    params = [
        GREEDY.with_(repetition_penalty=1.3, logprobs=1),
        GREEDY.with_(temperature=0.7, n=2, seed=9),
        GREEDY.with_(draft_tokens=0),
        GREEDY.with_(temperature=0.9, top_k=9, top_p=0.9, seed=2),
        GREEDY.with_(draft_tokens=1),
    ]
    want, _ = run(models["target"], params, prompts, device="cpu", speculate="off", num_draft_tokens=None)
    # 9 blocks of 16 tokens: rows are preempted, and computed and drafted for again
    options = {"kv_cache": 9 * 16 * 2 * 2 * 2 * 12 * 4, "draft_model": models[name]}
    found, (verified, _) = run(
        models["target"], params, prompts, **DEVICE | options, speculate="eagle" if name == "eagle1" else "draft"
    )
    assert found == want and verified > 5


@pytest.mark.slow
def test_look_ups_and_a_network_together(models, gpu_engine):
    options = {"speculate": "auto", "draft_model": models["other"], "num_draft_tokens": None}
    want, _ = run(models["target"], device="cpu", speculate="off", num_draft_tokens=None)
    assert run(models["target"], **DEVICE, **options)[0] == want


@pytest.mark.slow
def test_a_module_of_the_model_itself(models, gpu_engine, held):
    compare(models["mtp"], held, PARAMS[:2], PROMPTS[:2], speculate="mtp")


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "hosted"), [(3, False), (1, True)])
def test_a_head_keeps_its_context_where_drafts_are_done_without(models, gpu_engine, monkeypatch, runs, hosted):
    """Its drafts are those of a head that was asked after every step. `hosted`: the host draws for one row."""
    prompts, params = PROMPTS[1:], [each.with_(max_tokens=20) for each in PARAMS[:2]]
    if hosted:
        params[1] = params[0].with_(repetition_penalty=1.3)
    options = OPTIONS | {"speculate": "eagle", "draft_model": models["eagle1"]}
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: runs)

    places = drafts_by_place(monkeypatch)
    with LLM(models["target"], device="cpu", **options | {"num_draft_tokens": 2}) as llm:
        places.append({})
        want = tokens(llm.generate(prompts, params))
    with LLM(models["target"], **options | DEVICE | {"num_draft_tokens": None}) as llm:
        policy, ways = llm.engine.core.scheduler.drafting, []

        def change(plan, result):
            ways.append((policy.speculates, plan.num_runs))
            policy._wanted = len(ways) // 4 % 2 == 0

        policy._policy, policy.observe_step = FixedDepth(2, ("eagle",)), change
        places.append({})
        assert tokens(llm.generate(prompts, params)) == want
    assert any(not drafting and count > 1 for drafting, count in ways) == (runs > 1)
    wanted, found = places
    both = {place for place in found.keys() & wanted.keys() if not hosted or place[0] == 0}  # on a GPU 1 drafts freely
    assert len(both) > 4 and {place: found[place] for place in both} == {place: wanted[place] for place in both}


@pytest.mark.slow
def test_a_window_reaches_over_blocks_that_are_held_where_drafts_follow(models, gpu_engine, held, monkeypatch):
    """Of the two tokens that a chain behind a verification begins with, the first one's window as well."""
    original, reached = DeviceDraftRunner.follow, []

    def follow(self, rows, starts, lengths, limits, num_runs):
        depth = original(self, rows, starts, lengths, limits, num_runs)
        for row, start in zip(rows.tolist() if depth else (), starts.tolist(), strict=False):
            (table,) = self.kv._tables[str(row)]
            first = max(0, start - self.model.attention_layers[0].window + 1) // 16
            assert GONE not in table[first:], "where all drafts are refused, the token at `start` is run again"
            reached.append(first)
        return depth

    monkeypatch.setattr(DeviceDraftRunner, "follow", follow)
    options = {"speculate": "draft", "draft_model": models["windowed"]}
    compare(models["target"], held, GREEDY.with_(max_tokens=40), PROMPTS[2:], **options)
    assert not INTERPRETED or max(reached) > 1, "blocks were given back"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["other", "windowed", "eagle3"])
def test_several_verifications_a_visit(models, gpu_engine, monkeypatch, name):
    """What drafts for the next run goes on from the one before it, before the host has seen either."""
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: 3)
    for graphs in (Graphs, GraphLauncher):  # else so few of a kind may not be worth a graph
        monkeypatch.setattr(graphs, "_repays", lambda self, key: True)
    results, original = [], FixedDepth.observe_step
    monkeypatch.setattr(FixedDepth, "observe_step", lambda *each: (results.append(each[1:]), original(*each)))
    target = models["deep" if name == "eagle3" else "target"]
    options = {"speculate": "eagle" if name.startswith("eagle") else "draft", "draft_model": models[name]}
    params, prompts = [each.with_(max_tokens=21) for each in PARAMS[:2]], PROMPTS[::2]
    want, (_, right) = run(target, params, prompts, device="cpu", **options)
    found, (verified, accepted) = run(target, params, prompts, **DEVICE, **options)
    assert found == want
    repeated = [result for plan, result in results if plan.num_drafts.any() and result.num_runs > 1]
    assert len(repeated) > 2 and verified > 20
    for result in repeated:
        assert [sum(runs) for runs in result.accepted_by_run] == result.num_accepted
        assert [len(runs) for runs in result.accepted_by_run] == [result.num_runs] * len(result.tokens)
    assert abs(accepted - right) <= 6, "the drafts are as good as those that the host waits for, but at the ends"


@pytest.mark.slow
def test_what_fails_between_two_verifications_ends_the_visit(models, gpu_engine, monkeypatch):
    """The runs that were sent count, the proposer is dropped, and requests go on without drafts."""
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: 4)
    calls, original = [], ChainRunner.again

    def again(self):
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("no more of this")
        original(self)

    monkeypatch.setattr(ChainRunner, "again", again)
    options = {"speculate": "eagle", "draft_model": models["eagle1"]}
    params, prompts = [each.with_(max_tokens=15) for each in PARAMS[:2]], PROMPTS[::2]
    want, _ = run(models["target"], params, prompts, device="cpu", **options)
    with LLM(models["target"], **{**OPTIONS, **options, **DEVICE}) as llm:
        assert tokens(llm.generate(prompts, params)) == want
        assert llm.engine.ledger.totals.proposers_dropped == (len(calls) >= 3)
        llm.engine.core.scheduler.check()
    assert len(calls) == 3 or not INTERPRETED


class _Arriving:
    """A kernel of whole steps that has been compiled meanwhile, and serves nothing."""

    def arrives(self):
        return True

    def serves(self, key):
        return False

    def too_far(self, plan):
        return False


@pytest.mark.skipif(not INTERPRETED, reason="the captures are stand-ins")
def test_graphs_are_made_anew_when_a_draft_model_s_kernel_arrives(models, gpu_engine, monkeypatch):
    """In an idle moment, in which nobody else has entered torch's inference mode."""
    captured = []

    def record(graphs, key):
        graphs._idle(key)
        graphs._body(key)
        captured.append(key)

    monkeypatch.setattr(Graphs, "_record", record)
    options = {"speculate": "draft", "draft_model": models["other"]}
    with LLM(models["target"], **OPTIONS | DEVICE | options) as llm:
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        runner = proposer.runner.sender._runner
        runner._step_kernel, runner.launcher._capturing = _Arriving(), True
        assert llm.engine.core.idle()
        runner.launcher._capturing = False
        assert captured and runner.launcher._capturing_failed is None


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "the head"])
def test_a_head_that_only_watches_keeps_features_of_its_own(models, gpu_engine, monkeypatch, who):
    """Also where others are asked, and after steps that verify: its later drafts are those of one always asked."""
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: 2)
    places = drafts_by_place(monkeypatch)
    options = OPTIONS | DEVICE | {"speculate": "auto", "draft_model": models["eagle1"], "num_draft_tokens": 2}
    found = []
    for rests in (False, True):
        with LLM(models["target"], **options) as llm:
            names, steps = llm.engine.config.proposers, [0]
            for proposer in llm.engine._worker.proposer._proposers.values():
                if not hasattr(proposer, "last_passes"):
                    monkeypatch.setattr(proposer, "propose", lambda context: None)
            policy = llm.engine.core.scheduler.drafting = FixedDepth(2, names)

            def limits(requests, num_rows, rests=rests, steps=steps, names=names):
                steps[0] += 1
                wanted = np.full((len(names), len(requests)), 2, np.int32)
                if rests and steps[0] > 2 and steps[0] % 6 < 4:
                    wanted[names.index("eagle")] = 0
                    return wanted[:0] if who == "all" else wanted
                return wanted

            policy.limits = limits
            places.append({})
            greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            found.append(tokens(llm.generate(PROMPTS[:2], greedy)))
    assert found[0] == found[1]
    always, seldom = places
    both = always.keys() & seldom.keys()
    assert len(both) > 6 and {each: seldom[each] for each in both} == {each: always[each] for each in both}
