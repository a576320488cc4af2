"""Experts on a GPU: the kernels against the op's definition, and engines against the CPU's."""

import pytest
import torch

from headrace import LLM, SamplingParams, ops
from headrace.ops.moe import Experts, Routing, choose
from headrace.ops.triton import moe as triton_moe
from tiny import write_tiny_mixtral

SMALL = {"max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 8}


def block(random, dtype, num=5, hidden=48, inner=40, bias=False, activation="silu"):
    return Experts(
        (random(num, 2 * inner, hidden) * 0.2).to(dtype),
        (random(num, hidden, inner) * 0.2).to(dtype),
        activation,
        random(num, 2 * inner) * 0.1 if bias else None,
        random(num, hidden) * 0.1 if bias else None,
    )


def definition(x, scores, experts, routing):
    """What the op's reference gives, in float32 on the CPU."""

    def plain(array):
        return None if array is None else array.float().cpu()

    weights = (plain(experts.gate_up), plain(experts.down))
    biases = (plain(experts.gate_up_bias), plain(experts.down_bias))
    block = Experts(*weights, experts.activation, *biases)
    return ops.moe.reference(plain(x), plain(scores), block, routing).to(x.device)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("num", [3, 16, 40])
def test_routing(random, device, normalise, num):
    scores = random(9, num)
    scores[3] = 0.0  # all equal: the first ones
    chosen, weights = triton_moe.choose(scores, Routing(2, normalise))
    want, shares = choose(scores.cpu(), Routing(2, normalise))
    order = torch.argsort(want, dim=1)
    assert chosen.cpu().tolist() == want.gather(1, order).tolist()
    torch.testing.assert_close(weights.cpu(), shares.gather(1, order), rtol=1e-5, atol=1e-6)


def test_scores_that_are_no_numbers_choose_some_experts(device):
    scores = torch.full((2, 6), float("nan"), device=device)
    scores[1] = float("inf")
    chosen, _ = triton_moe.choose(scores, Routing(3, True))
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 6 for row in chosen.tolist())


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(
    ("bias", "activation"),
    [(False, "silu"), (True, "swiglu_clamped"), (False, "gelu_tanh")],
    ids=lambda each: str(each),
)
def test_the_block_against_its_definition(random, dtype, tolerance, tokens, bias, activation):
    experts, x = block(random, dtype, bias=bias, activation=activation), random(tokens, 48).to(dtype)
    scores, routing = random(tokens, 5), Routing(2, True)
    want = definition(x, scores, experts, routing)
    found = triton_moe.moe(x, scores, experts, routing)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def test_many_tokens_of_one_expert_and_experts_without_any(random, dtype, tolerance):
    experts, x = block(random, dtype, num=20), random(50, 48).to(dtype)
    scores = torch.zeros((50, 20), device=x.device)
    scores[:, 7], scores[:25, 19] = 4.0, 3.0
    want = definition(x, scores, experts, Routing(1, False))
    found = triton_moe.moe(x, scores, experts, Routing(1, False))
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def test_a_token_has_the_same_bits_beside_others(random, dtype):
    experts, x, scores = block(random, dtype, num=4), random(12, 48).to(dtype), random(12, 4)
    whole = triton_moe.moe(x, scores, experts, Routing(2, True))
    for token in range(12):
        alone = triton_moe.moe(x[token : token + 1], scores[token : token + 1], experts, Routing(2, True))
        assert torch.equal(whole[token : token + 1], alone)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return write_tiny_mixtral(tmp_path_factory.mktemp("moe"))


@pytest.mark.slow
def test_a_model_with_experts_gives_the_same_tokens_as_on_the_cpu(mixtral, gpu_engine):
    prompts = [[5, 6, 7, 8, 9], list(range(10, 45))]
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_tokens=3, ignore_eos=True),
    ]

    def answers(**options):
        with LLM(str(mixtral), mode="exact", **SMALL, **options) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    assert answers(device="cuda", kv_cache="1MiB") == answers(device="cpu")
