"""The kernel of a whole decode step, on a GPU, against float32; what it refuses and how it is built, anywhere."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from whole_step_model import StepInputs, make_model, reference_step, spec_of

from headrace.core.plan import StepPlan
from headrace.ops.cuda.library import Build, BuildError, StepLibrary, compiler_version, find_compiler, unavailable
from headrace.ops.cuda.shape import SHARED, cut_product, cut_step, measured_rows
from headrace.worker import step_kernel
from headrace.worker.graphs import GraphKey
from headrace.worker.step_kernel import refusals, shape_of
from headrace.worker.whole_step import WholeStep

NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or unavailable(torch.cuda.get_device_capability()) is not None,
    reason="needs a Hopper GPU and nvcc",
)
NEEDS_NVCC = pytest.mark.skipif(find_compiler() is None, reason="needs nvcc")
PATIENCE = ("-DSPIN_LIMIT=2000000",)  # a deadlock ends with an error

# name -> (model, block size)
MODELS = {
    "smollm": (spec_of(576, 1536, 9, 3, 64, tie_word_embeddings=True), 16),
    "wide heads": (spec_of(1024, 2816, 8, 2, 128, vocab=1003), 16),
    "bias, seven mates": (spec_of(896, 4864, 14, 2, 64, bias=True), 16),
    "norms of heads": (spec_of(512, 1088, 8, 8, 128, qk_norm=True, activation="gelu_tanh"), 32),
    "twelve mates, odd blocks": (spec_of(768, 1024, 12, 1, 64), 5),
    "large": (spec_of(4096, 14336, 32, 8, 128, layers=1, vocab=32000), 16),
}
LENGTHS = {
    "one": [257], "first token": [1], "two, padded": [1, 700], "three": [16, 17, 3000], "four": [255, 256, 257, 31],
    "eight": [1, 2, 100, 3000, 16, 640, 33, 1500],
}  # fmt: skip
# name -> (context of each span's last token, tokens of each span)
SPANS = {
    "one draft": ([300], [2]), "a whole prompt": ([5], [5]), "seven drafts": ([1027], [8]),
    "across parts": ([259], [4]), "two spans, padded": ([17, 3000], [3, 2]), "beside one without": ([40, 700], [1, 4]),
    "four pairs": ([2, 256, 257, 1025], [2, 2, 2, 2]),
}  # fmt: skip


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """All at once, each by a process of its own."""
    folder = tmp_path_factory.mktemp("cuda")
    made = {
        name: Build(shape_of(spec, page), find_compiler(), folder, PATIENCE) for name, (spec, page) in MODELS.items()
    }
    yield made
    for build in made.values():
        build.stop()


@pytest.fixture(scope="module", params=MODELS)
def made(request, builds):
    spec, page = MODELS[request.param]
    build = builds[request.param]
    assert build.ready(wait=True)
    with torch.inference_mode():
        return make_model(spec), StepLibrary(build.path), build.shape, page


def whole_step(made, inputs, **options):
    model, library, shape, _ = made
    return WholeStep(library, shape, model, lambda layer: inputs.pages[layer], **options)


def error_of(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    ("ends", "counts"),
    [*((lengths, None) for lengths in LENGTHS.values()), *SPANS.values()],
    ids=[*LENGTHS, *SPANS],
)
@torch.inference_mode()
def test_logits_hidden_states_and_cache_are_those_of_float32(made, ends, counts):
    model, _, _, page = made
    inputs = StepInputs(model.spec, ends, page, counts=counts)
    before = [tuple(each.clone() for each in pair) for pair in inputs.pages]
    wanted, written = reference_step(model, inputs)
    tokens = len(inputs.lengths)
    capacity = next(size for size in (1, 2, 4, 8) if size >= tokens)
    step = whole_step(made, inputs, least_keys=32 if counts else 256)
    logits = step.logits(*inputs.step(capacity))[:tokens]
    assert error_of(logits, wanted) < 2e-2
    assert error_of(model.logits(step.hidden(tokens)), wanted) < 2e-2
    for layer, pair in enumerate(inputs.pages):
        for found, old, new in zip(pair, before[layer], written[layer], strict=True):
            for token, length in enumerate(inputs.lengths):
                block, inside = inputs.place(token, length - 1)
                assert error_of(found[block, :, inside].float(), new[token]) < 2e-2
                found[block, :, inside] = old[block, :, inside]
            assert torch.equal(found.view(torch.int16), old.view(torch.int16)), "something else was written"


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("least_keys", [16, 256])
@pytest.mark.parametrize(("ends", "counts"), [([1500, 40, 700, 3, 257], None), ([1500, 257], [3, 2])])
@torch.inference_mode()
def test_the_same_bits_in_every_run_and_in_a_graph(made, least_keys, ends, counts):
    model, _, _, page = made
    inputs = StepInputs(model.spec, ends, page, counts=counts)
    step = whole_step(made, inputs, least_keys=least_keys)
    called = inputs.step(8)
    first = step.logits(*called)[:5].clone()
    assert error_of(first, reference_step(model, inputs)[0]) < 2e-2
    for _ in range(5):
        assert torch.equal(step.logits(*called)[:5], first)
    graph = torch.cuda.CUDAGraph()
    called[2].zero_()  # as graphs are captured: of padding only
    with torch.cuda.graph(graph):
        logits = step.logits(*called)
    graph.replay()
    called[2].fill_(5)
    for _ in range(3):
        logits.zero_()
        graph.replay()
        assert torch.equal(logits[:5], first)


@pytest.mark.gpu
@NEEDS_GPU
@torch.inference_mode()
def test_steps_of_padding_only_write_nothing(made):
    model, _, _, page = made
    inputs = StepInputs(model.spec, [5, 6], page)
    before = [tuple(each.clone() for each in pair) for pair in inputs.pages]
    called = inputs.step(2)
    called[2].zero_()
    whole_step(made, inputs).logits(*called)
    for pair, old in zip(inputs.pages, before, strict=True):
        for found, kept in zip(pair, old, strict=True):
            assert torch.equal(found.view(torch.int16), kept.view(torch.int16))


@pytest.mark.gpu
@NEEDS_GPU
@torch.inference_mode()
def test_logits_of_fewer_tokens_are_the_first_of_all(made):
    model, _, _, page = made
    inputs = StepInputs(model.spec, [40, 700], page)
    called = inputs.step(2)
    whole = whole_step(made, inputs).logits(*called).clone()
    wanted = model.spec.vocab_size - 7
    assert torch.equal(whole_step(made, inputs, vocab_size=wanted).logits(*called), whole[:, :wanted])


# -- anywhere


@NEEDS_NVCC
def test_a_build_is_made_once(tmp_path):
    shape = shape_of(MODELS["smollm"][0], 16)
    build = Build(shape, find_compiler(), tmp_path)
    assert build.ready(wait=True) and build.path.exists()
    again = Build(shape, find_compiler(), tmp_path)
    assert again.path == build.path and again.ready()
    assert [each.name for each in tmp_path.iterdir()] == [build.path.name]
    other = Build(replace(shape, page=32), find_compiler(), tmp_path)
    other.stop()
    assert other.path != build.path


@NEEDS_NVCC
def test_a_compilers_words_are_kept(tmp_path):
    shape = replace(shape_of(MODELS["smollm"][0], 16), head_dim=80)
    build = Build(shape, find_compiler(), tmp_path)
    with pytest.raises(BuildError, match="heads are of 64 or 128"):
        build.ready(wait=True)
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_does_not_run_is_said(tmp_path):
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho out of order\nexit 3\n")
    (tmp_path / "nvcc").chmod(0o755)
    with pytest.raises(BuildError, match="out of order"):
        compiler_version(tmp_path / "nvcc")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"windows": (20, None)}, "sliding window"),
        ({"attention_soft_cap": 50.0}, "soft cap"),
        ({"logit_soft_cap": 30.0}, "soft cap"),
        ({"attention_sinks": True}, "sinks"),
        ({"mlp_bias": True}, "biases"),
        ({"activation": "gelu"}, "no activation gelu"),
        ({"head_dim": 80}, "not 80"),
        ({"hidden_size": 1000}, "hidden size 1000"),
        ({"intermediate_size": 1000}, "intermediate size 1000"),
        ({"num_heads": 34, "num_kv_heads": 2}, "at most 16"),
        ({"family": "gemma2"}, "gemma2"),
    ],
)
def test_what_the_kernel_lacks_is_refused(change, reason):
    spec = MODELS["smollm"][0]
    assert refusals(spec, "bfloat16", False) == []
    assert reason in "; ".join(refusals(replace(spec, **change), "bfloat16", False))


def test_other_numbers_and_invariance_are_refused():
    spec = MODELS["smollm"][0]
    assert refusals(spec, "float32", False) == ["computes in bfloat16, not float32"]
    assert refusals(spec, "bfloat16", True) == ["is not invariant"]
    assert "9.0" in unavailable((8, 0))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("inner", [576, 1088, 1536, 4096, 11008, 14336, 18944])
def test_a_cut_covers_the_whole_matrix_once(rows, inner):
    cut = cut_product(4096, inner, rows, SHARED - (140 << 10), 132, may_split=True)
    assert cut is not None and cut.splits * cut.span == inner and 132 % cut.splits == 0
    assert (cut.chunks - 1) * cut.chunk < cut.span <= cut.chunks * cut.chunk
    assert cut.chunk <= 1024 and cut.chunk % cut.box == 0 and cut.span % cut.box == 0
    assert cut.source_bytes(rows) <= SHARED - (140 << 10)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((576, 1536, 9, 3, 64), 8),
        ((2048, 8192, 32, 8, 64), 8),
        ((3072, 8192, 24, 8, 128), 4),
        ((4096, 14336, 32, 8, 128), 4),
        ((5120, 17408, 40, 8, 128), 0),
    ],
)
def test_rows_are_those_that_were_measured(sizes, rows):
    assert measured_rows(shape_of(spec_of(*sizes), 16)) == rows


class FakeBuild:
    """A build whose library comes with the second question, or never."""

    shape, path = None, Path("library")

    def __init__(self, error=None):
        self._error, self.asked, self.stopped = error, 0, False

    def ready(self):
        self.asked += 1
        if self.asked < 2:
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self):
        self.stopped = True


@pytest.fixture
def fake_step(monkeypatch):
    class FakeStep:
        most_rows = 4

        def __init__(self, *parts, vocab_size=None):
            pass

        def try_launch(self):
            pass

    monkeypatch.setattr(step_kernel, "StepLibrary", lambda path: None)
    monkeypatch.setattr(step_kernel, "WholeStep", FakeStep)
    return FakeStep


def kernel_of(build, limit=8):
    class Cache:
        pages = None
        layout = SimpleNamespace(block_bytes=16 << 15, block_size=16)

    return step_kernel.StepKernel(build, limit, None, Cache())


def test_the_chain_serves_until_the_kernel_is_compiled(fake_step):
    kernel = kernel_of(FakeBuild())
    small, large = GraphKey(4, 4, True, False), GraphKey(8, 8, False, False)
    assert not kernel.serves(small) and kernel.state == "being compiled"
    assert kernel.arrives() and not kernel.arrives()
    assert kernel.serves(small) and not kernel.serves(large) and kernel.state == "up to 4 tokens"
    drafts = GraphKey(2, 4, False, False, short=True)
    assert kernel.serves(drafts) and not kernel.serves(replace(drafts, num_tokens=5))
    assert not kernel.serves(replace(drafts, tree=True)) and not kernel.serves(replace(drafts, far=True))
    assert not kernel.serves(GraphKey(2, 64, False, False))


def test_drafts_behind_long_contexts_are_for_the_chain(fake_step):
    kernel = kernel_of(FakeBuild())  # a token has 32 KiB of keys and values

    def too_far(start, length):
        spans = np.array([[0, 1], [start, start], [length, length], [length - 1, length - 1]], np.int32)
        return kernel.too_far(StepPlan(0, spans=spans, yields=np.ones(2, bool)))

    assert not too_far(8200, 2), "there is no kernel yet"
    assert kernel.arrives()
    assert not too_far(8000, 2) and too_far(8200, 2)
    assert not too_far(8200, 3), "so many tokens are not for the kernel, however far they look back"


@pytest.mark.parametrize("where", ["compiler", "launch"])
def test_what_went_wrong_is_said_once_and_the_chain_goes_on(fake_step, monkeypatch, capsys, where):
    error = BuildError("nvcc ended with 1: no such thing") if where == "compiler" else None

    def fails(self):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(fake_step, "try_launch", fails)
    kernel = kernel_of(FakeBuild(error))
    assert not kernel.arrives() and not kernel.arrives()
    assert capsys.readouterr().err.count("no such thing") == 1
    assert kernel.state == "off" and "no such thing" in kernel.failure
    assert not kernel.serves(GraphKey(1, 1, False, False))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"step_kernel": "off"}, "as asked"), ({}, "runs on a GPU"), ({"graphs": False}, "CUDA graphs")],
)
def test_a_worker_says_why_it_has_no_kernel(options, reason):
    values = {"step_kernel": "auto", "graphs": True, "dtype": "bfloat16", "invariant": False} | options
    device = torch.device("cpu") if "graphs" not in options else torch.device("cuda")
    choice = step_kernel.StepKernelChoice(MODELS["smollm"][0], SimpleNamespace(**values), None, device)
    assert choice.kernel(None, None) is None
    what, why = choice.state
    assert what == "off" and reason in why


def test_more_rows_than_shared_memory_holds_are_refused():
    shape = shape_of(spec_of(8192, 28672, 64, 8, 128), 16)
    assert cut_step(shape, 128256, 8, 80 << 10, 132) is None
    assert cut_step(shape, 128256, 4, 80 << 10, 132) is not None
