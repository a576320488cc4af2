"""Beam search against transformers' on a tiny model, alone and beside other work."""

import pytest

from headrace import LLM, SamplingParams
from tiny import write_tiny_llama

PROMPTS = ["river", "a longer prompt that fills more than one block of the cache", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("beam"), seed=3)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), mode="exact", max_num_seqs=16) as made:
        yield made


def beam_params(**changes):
    base = {"temperature": 0.0, "beam_width": 4, "n": 4, "max_tokens": 12, "ignore_eos": True}
    return SamplingParams(**{**base, **changes})


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 1.7])
def test_the_same_sequences_as_transformers(folder, llm, length_penalty, early_stopping):
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    oracle = LlamaForCausalLM.from_pretrained(folder)
    stop = [llm.engine.tokenizer.encode(letter)[0] for letter in "etaoin"]
    params = beam_params(
        ignore_eos=False, stop_token_ids=stop, length_penalty=length_penalty, early_stopping=early_stopping
    )
    for prompt in PROMPTS:
        ids = llm.engine.tokenizer.encode(prompt)
        (ours,) = llm.generate([ids], params)
        theirs = oracle.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=12,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=[*stop, *llm.engine.spec.eos_token_ids],
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for choice, sequence, score in zip(ours.outputs, theirs.sequences, theirs.sequences_scores, strict=True):
            assert choice.token_ids == sequence[len(ids) :][: len(choice.token_ids)].tolist()
            assert choice.score == pytest.approx(float(score), abs=2e-5)


def test_in_company_and_with_penalties(llm):
    options = [
        beam_params(),
        beam_params(repetition_penalty=1.4, n=2),
        beam_params(allowed_token_ids=list(range(60, 110)), beam_width=2, n=1),
        SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True, n=2),
    ]
    alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS for params in options]
    together = llm.generate([p for p in PROMPTS for _ in options], options * len(PROMPTS))
    for one, other in zip(alone, together, strict=True):
        assert [choice.token_ids for choice in one.outputs] == [choice.token_ids for choice in other.outputs]
    assert len({str(output.outputs[0].token_ids) for output in alone}) > len(PROMPTS)


def test_a_width_of_one_is_greedy(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (beam,) = llm.generate(["one"], beam_params(beam_width=1, n=1))
    assert beam.outputs[0].token_ids == llm.generate(["one"], greedy)[0].outputs[0].token_ids


@pytest.mark.parametrize("bad", [{"temperature": 1.0}, {"n": 5}, {"logprobs": 1}, {"best_of": 4}, {"beam_width": 0}])
def test_what_a_beam_cannot_do_is_refused(bad):
    with pytest.raises(ValueError, match=r"beam|n \("):
        beam_params(**bad)
