"""A GPU whose memory runs out while it runs: steps go on in parts, and what fits nowhere ends alone."""

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.autopilot.host_bound import HostBound
from headrace.worker.device_memory import NO_MEMORY
from headrace.worker.device_runner import DeviceRunner
from tiny import write_tiny_llama

SMALL = {"max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8, "mode": "exact"}
PROMPTS = [[5, 6, 7, 8, 9], list(range(10, 55)), [9, 8, 7] * 3, [3]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=2, repetition_penalty=1.3, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=9, max_tokens=3, ignore_eos=True),
]


@pytest.fixture
def scarce(monkeypatch):
    """Steps of more than so many tokens find no memory; the number can be changed."""
    limit = {"tokens": 10**9, "failures": 0}
    original = DeviceRunner._step

    def step(self, batch, warm, cut, *kernel):
        if batch.spans.token_ids.shape[0] > limit["tokens"]:
            limit["failures"] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more")
        return original(self, batch, warm, cut, *kernel)

    monkeypatch.setattr(DeviceRunner, "_step", step)
    return limit


def outputs(model, prompts=PROMPTS, params=PARAMS, **options):
    options = {"device": "cuda", "kv_cache": "1MiB", "cuda_graphs": False, **SMALL, **options}
    with LLM(str(model), **options) as llm:
        found = llm.generate(prompts, params)
        llm.engine.core.scheduler.check()
    return [output.outputs[0] for output in found]


@pytest.mark.slow
def test_steps_that_do_not_fit_run_in_parts(tmp_path, gpu_engine, scarce, capfd):
    model = write_tiny_llama(tmp_path)
    want = outputs(model, device="cpu")
    scarce["tokens"] = 40  # the rest of the longest prompt, 39 tokens, fits beside one other row
    found = outputs(model)
    assert scarce["failures"] > 0
    assert [each.token_ids for each in found] == [each.token_ids for each in want]
    assert found[2].logprobs is not None and len(found[2].logprobs) == 2
    assert "the GPU's memory ran out; the step runs again in parts" in capfd.readouterr().err


@pytest.mark.slow
def test_steps_with_drafts_run_again_without(tmp_path, gpu_engine, scarce, capfd):
    model = write_tiny_llama(tmp_path, mtp=True)
    prompts, params = [[5, 6, 7, 5, 6], [9, 8, 7, 9]], [PARAMS[0].with_(max_tokens=7), PARAMS[2].with_(max_tokens=7)]
    want = outputs(model, prompts, params, device="cpu")
    scarce["tokens"] = 9  # the prompts fit together, two rows with four drafts each do not
    found = outputs(model, prompts, params, speculate="mtp", num_draft_tokens=4)
    assert scarce["failures"] > 0
    assert [each.token_ids for each in found] == [each.token_ids for each in want]
    assert "the step runs again in parts" in capfd.readouterr().err


def test_what_fits_nowhere_ends_with_the_reason_and_the_others_go_on(tmp_path, gpu_engine, scarce):
    model = write_tiny_llama(tmp_path)
    want = outputs(model, device="cpu")
    scarce["tokens"] = 38
    found = outputs(model)
    assert found[1].finish_reason == "error" and NO_MEMORY in (found[1].error or "")
    assert [found[i].token_ids for i in (0, 2, 3)] == [want[i].token_ids for i in (0, 2, 3)]


@pytest.mark.slow
def test_what_is_in_flight_is_read_before_a_step_runs_in_parts(tmp_path, gpu_engine, scarce, monkeypatch):
    """Parts take the places where results land."""
    model = write_tiny_llama(tmp_path, layers=1)
    params = [SamplingParams(temperature=0, max_tokens=6 + more, ignore_eos=True) for more in range(4)]
    want = outputs(model, params=params, device="cpu")
    execute = DeviceRunner.execute

    def sent(self, plan):
        scarce["tokens"] = 2 if plan.num_tokens == plan.num_spans else 10**9
        return execute(self, plan)

    monkeypatch.setattr(DeviceRunner, "execute", sent)
    found = outputs(model, params=params, steps_in_flight=2)
    assert scarce["failures"] > 0
    assert [each.token_ids for each in found] == [each.token_ids for each in want]


def test_a_visit_goes_on_where_its_memory_ran_out(tmp_path, gpu_engine, monkeypatch):
    model, params = write_tiny_llama(tmp_path, layers=1), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    want = outputs(model, [[1, 2, 3]], params, device="cpu")
    step, calls = DeviceRunner._step, []

    def fails_once(self, *args):
        calls.append(args)
        if len(calls) == 4:  # the prompt, then the third run of a visit
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *args)

    monkeypatch.setattr(DeviceRunner, "_step", fails_once)
    monkeypatch.setattr(HostBound, "runs", lambda self, num_rows, serial=False: 4)
    found = outputs(model, [[1, 2, 3]], params, steps_in_flight=2)
    assert len(calls) > 4 and [each.token_ids for each in found] == [each.token_ids for each in want]


def test_steps_are_ranges_of_profilers_if_asked(tmp_path, gpu_engine, monkeypatch):
    open_ranges, names = [], []
    monkeypatch.setenv("HEADRACE_NVTX", "1")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (open_ranges.append(name), names.append(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: open_ranges.pop())
    outputs(write_tiny_llama(tmp_path), [[1, 2]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert names and not open_ranges and "rows" in names[0]
