"""Features for the training of heads, made by the GPU's kernels: those of the CPU's."""

import numpy as np
import pytest
import torch

from headrace import LLM
from headrace.loading.checkpoint import open_checkpoint
from headrace.ops.registry import using
from headrace.train.prompts import Prompt
from headrace.train.target import Target
from headrace.train.texts import TextFolder, write_texts
from tiny import write_tiny_llama


@pytest.mark.parametrize("window", [None, 7])
def test_features_and_probabilities_are_those_of_the_cpu(tmp_path, device, window):
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "model", window=window))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 250, (3, 20)))
    ids = torch.arange(0, 250, 2)
    with using():
        cpu = Target(checkpoint, torch.device("cpu"), torch.float32, 32)
        wanted = cpu.hidden(tokens)
        shares, best = cpu.probabilities(wanted.reshape(-1, 48), ids)
        embedded, rows = cpu.embed(tokens), cpu.output_rows(ids)
    with using():
        gpu = Target(checkpoint, device, torch.float32, 32, on_gpu=True)
        found = gpu.hidden(tokens)
        assert torch.allclose(found.cpu(), wanted, atol=2e-4)
        its_shares, its_best = gpu.probabilities(found.reshape(-1, 48), ids.to(device))
        assert torch.allclose(its_shares.cpu(), shares, atol=1e-4)
        assert (its_best.cpu() == best).all()
        assert torch.allclose(gpu.embed(tokens).cpu(), embedded, atol=1e-6)
        assert torch.allclose(gpu.output_rows(ids).cpu(), rows, atol=1e-6)


@pytest.mark.slow
def test_texts_that_a_gpu_writes_are_those_of_the_cpu(tmp_path, gpu_engine):
    model = str(write_tiny_llama(tmp_path / "model"))
    prompts = [Prompt(f"say {word}") for word in ("one", "two", "three")]
    found = {}
    for device in ("cpu", "cuda"):
        folder = TextFolder(tmp_path / device, {})
        with LLM(
            model, device=device, kv_cache="1MiB", mode="exact", max_model_len=64, max_num_seqs=2,
            max_num_batched_tokens=32,
        ) as llm:  # fmt: skip
            write_texts(
                llm.engine, prompts, folder, num_tokens=30, max_tokens=9, temperatures=(0.0, 0.7), minutes=None,
                tell=lambda written: None,
            )  # fmt: skip
        # texts that were cut at the end are as long as the device happened to be far
        found[device] = {text.job: text.tokens[: text.prompt_len + 8].tolist() for text in folder.texts}
    shared = found["cpu"].keys() & found["cuda"].keys()
    assert len(shared) >= 3
    assert all(found["cpu"][job] == found["cuda"][job] for job in shared)
