"""The engine on a GPU's code against the engine on the CPU, float32 on both: the same tokens, whatever the options."""

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.autopilot.host_bound import HostBound
from headrace.config import ConfigError
from headrace.worker.graphs import GraphKey, GraphLauncher
from tiny import write_tiny_llama

PROMPTS = [[5, 6, 7, 8, 9], [1, 2, 3], list(range(10, 60)), [9, 8, 7, 6, 5, 4, 3, 2, 1] * 3, [3]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=4, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5, repetition_penalty=1.3, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.7, n=2, seed=9, max_tokens=5, ignore_eos=True),
]
SMALL = {"max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 8}


def answers(model, params=PARAMS, prompts=PROMPTS, **options):
    with LLM(str(model), **options) as llm:
        outputs = llm.generate(prompts, params)
        llm.engine.core.scheduler.check()
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), window=20)


def test_the_same_tokens_as_on_the_cpu(model, gpu_engine):
    want = answers(model, device="cpu", mode="exact", **SMALL)
    assert answers(model, device="cuda", mode="exact", kv_cache="1MiB", **SMALL) == want


@pytest.mark.slow
def test_prompts_beside_a_full_table_run_padded(model, gpu_engine, monkeypatch):
    """One span more than there are rows: that of the padding."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 3, 4)]
    options = SMALL | {"max_num_seqs": 2}
    want = answers(model, params, PROMPTS[:3], device="cpu", mode="exact", **options)
    keys = []
    picked = GraphLauncher.pick
    monkeypatch.setattr(GraphLauncher, "pick", lambda *args: keys.append(picked(*args)) or keys[-1])
    assert answers(model, params, PROMPTS[:3], device="cuda", mode="exact", kv_cache="1MiB", **options) == want
    assert any(key.num_rows == 3 for key in keys) and None not in keys


@pytest.mark.parametrize("runs", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_several_runs_of_a_step_give_the_same_tokens(model, gpu_engine, monkeypatch, runs):
    params = [each.with_(max_tokens=3 * runs) for each in PARAMS[:2]]
    want = answers(model, params, PROMPTS[:2], device="cpu", mode="exact", **SMALL)
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: runs)
    with LLM(str(model), device="cuda", mode="exact", kv_cache="1MiB", **SMALL) as llm:
        outputs = llm.generate(PROMPTS[:2], params)
        llm.engine.core.scheduler.check()
        steps = [record for record in llm.engine.ledger.records() if record.num_decode_tokens]
        assert any(record.num_decode_tokens == runs * record.num_spans for record in steps)
    assert [[choice.token_ids for choice in output.outputs] for output in outputs] == want


@pytest.mark.slow
def test_what_runs_beyond_a_stop_is_not_counted(model, gpu_engine, monkeypatch):
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: 4)
    with LLM(str(model), device="cuda", mode="exact", kv_cache="1MiB", **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        third = llm.generate([1, 2, 3], params)[0].outputs[0].token_ids[2]
        before = llm.engine.ledger.totals.output_tokens
        (output,) = llm.generate([1, 2, 3], params.with_(max_tokens=20, stop_token_ids=(third,)))
        told = len(output.outputs[0].token_ids)
        assert llm.engine.ledger.totals.output_tokens - before == told == llm.bill(output).output_tokens


@pytest.mark.slow
def test_a_model_without_a_window(tmp_path, gpu_engine):
    model = write_tiny_llama(tmp_path)
    want = answers(model, device="cpu", mode="exact", **SMALL)
    assert answers(model, device="cuda", mode="exact", kv_cache="1MiB", **SMALL) == want


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_and_memory_pressure_change_nothing(model, gpu_engine, depth):
    want = answers(model, device="cpu", mode="exact", **SMALL)
    # 20 blocks of 16 tokens: rows are preempted and computed again
    options = SMALL | {"kv_cache": 20 * 16 * 2 * 2 * 2 * 12 * 4, "max_model_len": 96}
    assert answers(model, device="cuda", mode="exact", steps_in_flight=depth, **options) == want


@pytest.mark.slow
def test_steps_as_they_are_without_padding(model, gpu_engine):
    want = answers(model, device="cpu", mode="exact", **SMALL)
    assert answers(model, device="cuda", mode="exact", kv_cache="1MiB", cuda_graphs=False, **SMALL) == want


@pytest.mark.slow
def test_two_byte_numbers_and_prompt_logprobs(model, gpu_engine):
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    want = answers(model, params, device="cpu", mode="exact", **SMALL)
    assert answers(model, params, device="cuda", dtype="float16", kv_cache="1MiB", **SMALL) == want


@pytest.mark.slow
def test_beams_and_bans(model, gpu_engine):
    params = [
        SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=5),
        SamplingParams(temperature=0, max_tokens=5, logit_bias={7: 5.0}, min_tokens=3),
        SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[1, 2, 3, 4]),
    ]
    want = answers(model, params, PROMPTS[:3], device="cpu", mode="exact", **SMALL)
    assert answers(model, params, PROMPTS[:3], device="cuda", mode="exact", kv_cache="1MiB", **SMALL) == want


def test_what_gpus_cannot_do_yet_is_said(model, gpu_engine):
    with pytest.raises(ConfigError, match="exact mode computes in float32"):
        LLM(str(model), device="cuda", mode="exact", dtype="bfloat16")
    with pytest.raises(ConfigError, match="dtype float16 is for GPUs"):
        LLM(str(model), device="cpu", dtype="float16")


@pytest.mark.slow
@pytest.mark.parametrize("key", [GraphKey(4, 4, True, True), GraphKey(4, 32, True, False)], ids=["decode", "mixed"])
def test_a_step_of_padding_only_leaves_everything_as_it_was(model, gpu_engine, key):
    """What a graph is captured from must not touch a running request."""
    with LLM(str(model), device="cuda", mode="exact", kv_cache="1MiB", **SMALL) as llm:
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        runner = llm.engine._worker._runner
        kept = [runner._table.view.words, *(page for pair in runner._cache._pages for page in pair)]
        kept = [each.view(torch.int32) for each in kept]  # pages nobody has written may hold anything, NaN too
        before = [each.clone() for each in kept]
        with torch.inference_mode():
            runner._builder.idle(key)
            runner._padded(key)
        assert all(torch.equal(new, old) for new, old in zip(kept, before, strict=True))
        tiles = runner._builder.padded_batch(key).tiles
        assert tiles is None or bool((tiles[0] == -1).all()), "attention would read blocks before a table's first"
