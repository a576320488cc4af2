"""FlashInfer as an attention backend: refusals, what it is told of a step, and, where it is installed, its results."""

import importlib.util
import sys
import types
from dataclasses import replace

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.attention import flashinfer as module
from headrace.attention.base import LayerAttention
from headrace.attention.flashinfer import FlashInferAttention, page_lists
from headrace.attention.select import select_backend
from headrace.attention.triton import TritonMeta
from headrace.core.kv_layout import KVGroup
from headrace.ops.triton.paged import PagedRows
from headrace.ops.triton.runtime import INTERPRETED
from headrace.ops.triton.step import StepSpans
from headrace.worker.device_batch import DeviceBatch
from tiny import write_tiny_llama

LAYER = LayerAttention(1.0, 4, 2, 64)
installed = importlib.util.find_spec("flashinfer") is not None


def test_why_it_cannot_be_used(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"FlashInfer is not installed: pip install 'headrace\[flashinfer\]'"):
        select_backend("cuda", "bfloat16", [LAYER], 16, "flashinfer")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.os.path, "exists", lambda path: False)
    assert "no nvcc" in FlashInferAttention.unavailable()
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name == "nvcc" else None)
    assert "no ninja" in FlashInferAttention.unavailable()
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    assert FlashInferAttention.unavailable() is None
    for layer, reason in ((replace(LAYER, head_dim=80), "head_dim 80"), (replace(LAYER, sinks=[1.0]), "sinks")):
        with pytest.raises(ValueError, match=reason):
            select_backend("cuda", "bfloat16", [layer], 16, "flashinfer")
    with pytest.raises(ValueError, match="not float32"):
        select_backend("cuda", "float32", [LAYER], 16, "flashinfer")


def test_it_is_never_chosen_unasked(monkeypatch):
    monkeypatch.setattr(FlashInferAttention, "unavailable", staticmethod(lambda: None))
    backend, refusals = select_backend("cuda", "bfloat16", [LAYER], 16)
    assert backend.name == "triton" and refusals == []
    assert select_backend("cuda", "bfloat16", [LAYER], 16, "flashinfer")[0].name == "flashinfer"


def test_backends_of_the_cpu_say_that_they_do_not_run_on_gpus():
    with pytest.raises(ValueError, match="native: runs on cpu, not on cuda"):
        select_backend("cuda", "bfloat16", [LAYER], 16, "native")


def i32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_lists_of_pages(device):
    table = i32([[9, 8, 7], [0, 0, 0], [4, 5, 6]], device)
    rows = PagedRows(table, i32([2, 0], device), i32([0, 3, 4], device), i32([33, 16], device), i32([2], device))
    starts, page_start, pages, last = (each.tolist() for each in page_lists(rows, 16))
    assert (starts, page_start, pages, last) == ([0, 3, 4], [0, 3, 4], [4, 5, 6, 9], [1, 16])


def test_steps_without_memory_are_planned_by_our_kernels():
    """A rehearsal's: there are no lengths to be read, and what it is to foresee are our kernels."""
    backend, meta = FlashInferAttention(16), torch.device("meta")
    group = KVGroup((0,), 2, 64, None)
    backend.reserve((group,), 4, 4, meta, 128)
    spans = StepSpans(*(i32([0] * 8, meta) for _ in range(6)), i32([[0] * 8], meta))
    batch = DeviceBatch(spans, None, i32([0], meta), (i32([[0]], meta),), i32([0], meta), i32([0], meta), 0, None, 8)
    planned = backend.plan(batch, 0, group)
    assert type(planned) is TritonMeta


class Wrapper:
    """What FlashInfer's does, as its documentation says, in plain torch."""

    planned = 0

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"

    def plan(
        self, query_start, page_start, pages, last_page, heads, kv_heads, dim, page, *,
        causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal and logits_soft_cap is None and q_data_type == kv_data_type
        starts, first_pages = query_start.tolist(), page_start.tolist()
        self.spans = list(
            zip(starts[:-1], starts[1:], first_pages[:-1], first_pages[1:], last_page.tolist(), strict=True)
        )
        self.pages, self.page, self.shared = pages, page, heads // kv_heads
        self.scale, self.left = sm_scale, window_left
        Wrapper.planned += 1

    def run(self, q, cache):
        out = torch.empty_like(q)
        for start, stop, first, last, in_last in self.spans:
            length = (last - first - 1) * self.page + in_last
            keys, values = (
                each[self.pages[first:last].long()].transpose(1, 2).flatten(0, 1)[:length].float() for each in cache
            )
            keys, values = (each.repeat_interleave(self.shared, 1) for each in (keys, values))
            position = torch.arange(length - (stop - start), length)[:, None]
            key = torch.arange(length)[None]
            hidden = (key > position) | ((key < position - self.left) if self.left >= 0 else False)
            score = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * self.scale
            weight = torch.softmax(score.masked_fill(hidden, float("-inf")), -1)
            out[start:stop] = torch.einsum("hqk,khd->qhd", weight, values).to(q.dtype)
        return out


@pytest.mark.skipif(not INTERPRETED, reason="a stand-in for the library, on the CPU")
@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_an_engine_with_it_gives_the_tokens_of_the_cpu(tmp_path, gpu_engine, monkeypatch, graphs):
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    monkeypatch.setattr(FlashInferAttention, "unavailable", staticmethod(lambda: None))
    caps = replace(FlashInferAttention.caps, kv_formats=frozenset({"float32"}), head_dims=None)
    monkeypatch.setattr(FlashInferAttention, "caps", caps)
    monkeypatch.setattr(Wrapper, "planned", 0)
    path = str(write_tiny_llama(tmp_path, window=20, layers=2))
    options = {"max_model_len": 128, "max_num_batched_tokens": 48, "max_num_seqs": 4, "mode": "exact"}
    params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)] * 3
    prompts = [list(range(30, 100)), [80, 81] * 10, [70]]
    with LLM(path, device="cpu", **options) as llm:
        want = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    more = {"kv_cache": "1MiB", "attention_backend": "flashinfer", "cuda_graphs": graphs}
    with LLM(path, device="cuda", **options, **more) as llm:
        assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == want
    assert (Wrapper.planned > 0) != graphs, "steps in graphs are ours"


@pytest.mark.skipif(
    INTERPRETED or not installed, reason="needs a GPU and FlashInfer: pip install 'headrace[flashinfer]'"
)
@pytest.mark.parametrize("window", [None, 100])
def test_the_library_gives_what_our_kernel_gives(window, random, device):
    from headrace.attention.flashinfer import FlashInferMeta, _Planned
    from headrace.ops.triton.paged import HeadShape, Scores
    from headrace.ops.triton.prefill import prefill_attention, prefill_tile

    if (reason := FlashInferAttention.unavailable()) is not None:
        pytest.skip(reason)
    shape, queries, lengths = HeadShape(8, 2, 128), [1, 40, 200], [300, 40, 500]
    cache = tuple(random(80, 2, 16, 128).bfloat16() for _ in range(2))
    starts = [0, 1, 41, 241]
    rows = PagedRows(
        torch.randperm(80, device=device)[:78].to(torch.int32).view(3, 26).repeat(1, 2)[:, :32].contiguous(),
        i32([0, 1, 2], device), i32(starts, device), i32(lengths, device), i32([3], device),
    )  # fmt: skip
    layer = LayerAttention(128**-0.5, 8, 2, 128, window=window)
    tokens = starts[-1]
    qkv = random(tokens, 12 * 128).bfloat16()
    slots = torch.full((tokens,), -1, dtype=torch.int32, device=device)  # the pages are as they are
    angles = torch.ones(tokens, 64, device=device), torch.zeros(tokens, 64, device=device)
    backend = FlashInferAttention(16)
    meta = FlashInferMeta(rows, slots, 0, None, (), False, None, planned=_Planned(*page_lists(rows, 16)))
    got = backend.run_fused(qkv, angles, None, cache, meta, layer)
    size = prefill_tile(shape)
    tiles = [(span, first) for span, count in enumerate(queries) for first in range(0, count, size)]
    given = tuple(i32(list(each), device) for each in zip(*tiles, strict=True))
    want = torch.empty_like(got)
    q = qkv[:, : 8 * 128].contiguous()
    prefill_attention(q, cache, rows, given, shape, Scores(layer.scale, None, window or 0), want)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
