"""`invariant`: what a row gets does not depend on what else is in its step."""

import math

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.ops.triton import decode, skinny
from headrace.ops.triton.paged import HeadShape
from headrace.ops.triton.runtime import INTERPRETED, RUNTIME
from headrace.worker.device_batch import DeviceBatchBuilder
from tiny import write_tiny_llama

SMALL = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 8}
real = pytest.mark.skipif(INTERPRETED, reason="bits are the GPU's; Triton's interpreter multiplies by numpy")


@pytest.fixture
def invariant(monkeypatch):
    monkeypatch.setattr(RUNTIME, "invariant", True)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 70, 200])
def test_products_of_any_number_of_tokens(random, dtype, tolerance, tokens, parts):
    x, weight, bias = random(tokens, 256).to(dtype), random(96, 256).to(dtype), random(96)
    found = skinny.skinny_linear(x, weight, bias, dtype, parts, skinny.invariant_tile(tokens, 96, 256, parts))
    found = found.sum(0) if found.ndim == 3 else found
    want = x.float() @ weight.float().T + bias
    torch.testing.assert_close(found.float(), want, rtol=tolerance, atol=tolerance * 16)


@pytest.mark.parametrize("inner", [576, 896, 4096, 4864, 14336])
def test_parts_end_at_the_same_element_for_any_number_of_tokens(monkeypatch, inner):
    monkeypatch.setattr(skinny, "INTERPRETED", False)
    for function in (skinny.choose_tile, skinny.invariant_tile):
        function.cache_clear()
    try:
        tiles = [skinny.invariant_tile(tokens, 896, inner, True) for tokens in (1, 17, 64, 65, 1000)]
    finally:
        for function in (skinny.choose_tile, skinny.invariant_tile):
            function.cache_clear()
    assert len({(tile.split, tile.inner) for tile in tiles}) == 1


@real
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("shape", [(896, 896), (6144, 4096), (4096, 14336), (576, 576), (49152, 576)])
def test_a_token_has_the_same_bits_in_every_product(random, shape, parts):
    rows, inner = shape
    x, weight = random(300, inner).bfloat16(), random(rows, inner).bfloat16()

    def product(tokens):
        tile = skinny.invariant_tile(tokens, rows, inner, parts)
        out = skinny.skinny_linear(x[:tokens].contiguous(), weight, None, torch.bfloat16, parts, tile)
        return out[..., 0, :]

    first = product(1)
    for tokens in (2, 16, 17, 33, 64, 65, 129, 300):
        assert torch.equal(product(tokens), first), tokens


@pytest.mark.parametrize("lengths", [[300], [300, 20, 5], [5, 300] + [70] * 6])
def test_a_row_is_cut_as_it_would_be_alone(invariant, device, lengths):
    from headrace.ops.triton.paged import PagedRows

    shape = HeadShape(4, 2, 16)
    space = decode.DecodeSpace.create(8, shape, 16, torch.float32, device, 512)
    count = len(lengths)

    def numbers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = numbers([[0] * 32] * count)
    paged = PagedRows(tables, numbers(range(count)), numbers(range(count + 1)), numbers(lengths), numbers([count]))
    decode.plan_decode(paged, shape, 0, space, 16, False)
    slots = int(space.counts)
    assert slots <= space.slots.shape[0]
    items = space.items[:slots].tolist()  # each slot has one
    assert [item for _, _, item in space.slots[:slots].tolist()] == list(range(slots))
    cuts = [steps for row, _, _, steps, *_ in items if row == lengths.index(300)]
    step = decode.decode_tile(1, 16, 4).step
    total = math.ceil(300 / step)
    size = max(decode.INVARIANT_LEAST // step, math.ceil(total / decode.INVARIANT_SPLITS))
    assert cuts == [min(size, total - at) for at in range(0, total, size)]


def answers(model, prompts, **options):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    with LLM(str(model), device="cuda", kv_cache="4MiB", invariant=True, **SMALL, **options) as llm:
        return [output.outputs[0] for output in llm.generate(prompts, params)]


PROMPTS = [list(range(5, 150)), [1, 2, 3], [7] * 40, list(range(9, 90)), [4, 5]]


@pytest.mark.slow
def test_the_same_tokens_as_on_the_cpu(tmp_path, gpu_engine):
    model = write_tiny_llama(tmp_path, window=20)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(str(model), device="cpu", mode="exact", **SMALL) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[1:3], params)]
    with LLM(str(model), device="cuda", mode="exact", kv_cache="4MiB", invariant=True, **SMALL) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS[1:3], params)] == want


@real
@pytest.mark.parametrize("dim", [64, 128])
def test_alone_as_in_company_bit_for_bit(tmp_path, gpu_engine, dim):
    model = write_tiny_llama(tmp_path, hidden=256, inner=512, dim=dim)
    together = answers(model, PROMPTS)
    for prompt, mate in zip(PROMPTS, together, strict=True):
        (alone,) = answers(model, [prompt])
        assert alone.token_ids == mate.token_ids
        assert alone.logprobs == mate.logprobs


LOOPS = [[65, 66, 67] * 20, [9] * 12, [80, 81, 82, 83] * 5]
FEW = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, allowed_token_ids=(70, 71))


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["ngram", "draft"])
def test_drafts_are_attended_as_tokens_alone(tmp_path, gpu_engine, monkeypatch, speculate):
    """In pieces of as many tokens as there are rows: beside rows of the host, and, of the model itself, padded."""
    import headrace.attention.triton as backend

    model, pieces, original = write_tiny_llama(tmp_path, window=20, layers=1), [], backend.TritonAttention._singles

    def singles(self, *rest):
        pieces.append(len(found := original(self, *rest)))
        return found

    monkeypatch.setattr(backend.TritonAttention, "_singles", singles)
    params = [FEW.with_(allowed_token_ids=None), FEW, FEW.with_(temperature=0.5, seed=2)]
    if speculate == "draft":
        params = [each.with_(allowed_token_ids=None, max_tokens=6) for each in params]
    options = {**SMALL, "max_num_seqs": 3, "mode": "exact"}
    with LLM(str(model), device="cpu", **options) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(LOOPS, params)]
    options |= {"kv_cache": "4MiB", "invariant": True, "speculate": speculate, "num_draft_tokens": 3}
    options |= {"draft_model": str(model)} if speculate == "draft" else {}
    with LLM(str(model), device="cuda", **options) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(LOOPS, params)] == want
        assert llm.engine.ledger.totals.accepted_draft_tokens > 3
    assert len(pieces) > 1 and max(pieces) > 1


@real
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("speculate", ["ngram", "draft"])
def test_with_drafts_as_without_bit_for_bit(tmp_path, gpu_engine, dim, speculate):
    model = write_tiny_llama(tmp_path, hidden=256, inner=512, dim=dim)
    prompts = [*LOOPS, *PROMPTS]
    plain = answers(model, prompts)
    options = {"draft_model": str(model)} if speculate == "draft" else {}
    drafted = answers(model, prompts, speculate=speculate, num_draft_tokens=4, **options)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert [each.logprobs for each in drafted] == [each.logprobs for each in plain]


@pytest.mark.slow
def test_a_prompts_last_token_goes_the_way_of_prompts(tmp_path, gpu_engine, monkeypatch):
    """Alone, beside texts that go on and behind a longer prompt: by the same kernel, so with the same bits."""
    sent = []
    original = DeviceBatchBuilder.send

    def send(self, plan, key, trees=None):
        batch = original(self, plan, key, trees)
        decodes = int(batch.num_decode_rows[0])
        sent.append((plan.lengths.tolist(), plan.starts.tolist(), decodes))
        return batch

    monkeypatch.setattr(DeviceBatchBuilder, "send", send)
    model = write_tiny_llama(tmp_path)
    answers(model, [[7]])
    answers(model, [[7], [1, 2, 3], [9]])
    firsts = [each for each in sent if 0 in each[1]]
    assert firsts and all(decodes == 0 for _, _, decodes in firsts)
    assert any(lengths == [1, 1, 1] and decodes == 3 for lengths, _, decodes in sent)
