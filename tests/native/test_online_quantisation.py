"""Weights quantised while they are loaded: what the file format says, and an engine that runs on it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import open_checkpoint
from headrace.models.registry import build_model
from headrace.quant.online import quantized
from headrace.quant.packed import Packed
from native.blocks import GROUPED, dequantized
from native.test_native_model import write_model
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def as_read(stored) -> np.ndarray:
    if stored.format in GROUPED:
        return dequantized(stored.format, stored.rows)
    return gguf.quants.dequantize(stored.rows, gguf.GGMLQuantizationType[stored.format])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([1e-5, 0.1, 300.0]),
    st.sampled_from([32, 64]),
)
def test_within_half_a_step(seed: int, rows: int, groups: int, size: float, group: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, group * groups)) * size).astype(np.float32)
    values[0, :group] = 0
    values[-1, -group:] = values[-1, -1]  # a group of one number
    groups_of = values.reshape(rows, -1, group)
    off8 = np.abs(as_read(quantized(values, "q8", group)) - values).reshape(groups_of.shape)
    step8 = np.abs(groups_of).max(-1, keepdims=True) / 127
    assert (off8 <= 0.5 * step8 * 1.001 + 127 * 2.0**-11 * step8 + 127 * 2.0**-25).all()
    off4 = np.abs(as_read(quantized(values, "q4", group)) - values).reshape(groups_of.shape)
    step4 = np.ptp(groups_of, axis=-1, keepdims=True) / 15
    rounding = 2.0**-10 * np.abs(groups_of).max(-1, keepdims=True) + 16 * 2.0**-25  # of the fp16 scale and minimum
    assert (off4 <= 0.5 * step4 + 3 * rounding).all()


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match="48 inputs do not divide into groups of 32; leave out quantize"):
        quantized(np.zeros((2, 48), np.float32), "q8")
    with pytest.raises(ValueError, match="96 inputs do not divide into groups of 64; give quantize_group=32"):
        quantized(np.zeros((2, 96), np.float32), "q4", 64)
    with pytest.raises(ValueError, match="not finite"):
        quantized(np.full((2, 32), np.nan, np.float32), "q4")


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    ("kind", "group", "layers", "head"),
    [
        ("q8", 32, "Q8_0", "Q8_0"),
        ("q4", 32, "Q4_1", "Q8_0"),
        ("q8", 64, "Q8_64", "Q8_64"),
        ("q4", 64, "Q4_64", "Q8_64"),
    ],
)
def test_every_matrix_of_a_model(
    path: str, tmp_path: Path, format: str, kind: str, group: int, layers: str, head: str
) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", {"": format}))
    plain = build_model(checkpoint.spec, WeightSource(checkpoint), Packed())
    model = build_model(checkpoint.spec, WeightSource(checkpoint), Packed(quantize=kind, group=group))
    assert {segment.format for segment in model.embedding.weight.segments} == {head}
    for mine, theirs in zip(model.layers, plain.layers, strict=True):
        for ours, exact in ((mine.attention.qkv, theirs.attention.qkv), (mine.mlp.down, theirs.mlp.down)):
            assert {segment.format for segment in ours.weights.segments} == {layers}
            expected = as_read(quantized(exact.weights.dequantize(), kind, group))
            np.testing.assert_array_equal(ours.weights.dequantize(), expected)


@pytest.mark.parametrize(("kind", "group"), [("q8", 32), ("q4", 32), ("q8", 64), ("q4", 64)])
def test_an_engine_answers_the_same_in_any_company(path: str, tmp_path: Path, kind: str, group: int) -> None:
    folder = str(write_tiny_llama(tmp_path, hidden=64, inner=192, dim=16))
    prompts = [[5, 9, 3], [7] * 30, [1, 2]]

    def tokens(outputs: list) -> list:
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(folder, quantize=kind, quantize_group=group, max_num_batched_tokens=16, max_num_seqs=3) as llm:
        together = tokens(llm.generate(prompts, GREEDY))
        assert together == [tokens(llm.generate([prompt], GREEDY))[0] for prompt in prompts]
        weight_bytes = llm.engine.ledger.records(1)[0].work.bytes_weights
    options = {"speculate": "ngram", "num_draft_tokens": 4, "block_size": 4, "prefix_caching": False}
    with LLM(folder, quantize=kind, quantize_group=group, **options) as llm:  # spans of other lengths, other chunks
        assert tokens(llm.generate(prompts, GREEDY)) == together
    with LLM(folder) as plain:
        plain.generate(prompts[:1], GREEDY)
        assert weight_bytes < {"q8": 0.6, "q4": 0.5}[kind] * plain.engine.ledger.records(1)[0].work.bytes_weights


def test_a_quantised_file_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", {"": "Q4_0"}))
    with pytest.raises(ValueError, match="is quantised already, as Q4_0; leave out quantize"):
        build_model(checkpoint.spec, WeightSource(checkpoint), Packed(quantize="q8"))


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantize must be one of none, q8, q4"):
        LLM(str(write_tiny_llama(tmp_path)), quantize="q5")
    with pytest.raises(ValueError, match="quantize_group must be 32 or 64, not 48"):
        LLM(str(tmp_path), quantize="q8", quantize_group=48)
    with pytest.raises(ValueError, match="give quantize=q8 or q4 too"):
        LLM(str(tmp_path), quantize_group=64)
    with pytest.raises(ValueError, match="do not divide into groups of 32"):
        LLM(str(tmp_path), quantize="q8")
