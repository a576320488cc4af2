"""Building models: families, tied heads, stray tensors, counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.layers.weights import WeightsError, WeightSource
from headrace.models.blocks import CausalLM
from headrace.models.registry import build_model, supported
from headrace.models.spec import ModelSpec
from models.harness import DictCheckpoint, Stepper, expected_shapes, random_model, random_tensors

SPEC = ModelSpec("llama", 50, 24, 32, 2, 4, 2, 6, 1e-5, 128)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def build(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> CausalLM:
    return build_model(spec, WeightSource(DictCheckpoint(tensors)))


def test_supported_families() -> None:
    assert list(supported()) == sorted(supported()) and {"llama", "gemma3", "gpt_oss"} <= set(supported())
    with pytest.raises(ValueError, match=r"'gpt9'; there are: gemma2, gemma3, gpt_oss, llama"):
        build(replace(SPEC, family="gpt9"), {})


def test_family_refuses_what_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="llama model has no qk_norm"):
        random_model(replace(SPEC, qk_norm=True))
    with pytest.raises(ValueError, match="qk_norm"):
        random_model(replace(SPEC, family="qwen3"))
    with pytest.raises(ValueError, match="'relu'"):
        random_model(replace(SPEC, activation="relu"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_tied_head(tied: bool, present: bool) -> None:
    tensors = random_tensors(SPEC)
    head = tensors["lm_head.weight"] if present else tensors.pop("lm_head.weight")
    spec = replace(SPEC, tie_word_embeddings=tied)
    if not (tied or present):
        with pytest.raises(WeightsError, match=r"missing: lm_head.weight \[50, 24\]"):
            build(spec, tensors)
        return
    model = build(spec, tensors)
    hidden = np.random.default_rng(1).standard_normal((3, 24), np.float32)
    expected = hidden @ (tensors["model.embed_tokens.weight"] if tied else head).T
    np.testing.assert_allclose(model.logits(hidden), expected, rtol=1e-5, atol=1e-5)
    again = build(spec, tensors)
    np.testing.assert_array_equal(Stepper(model, 1, 16).step({0: IDS})[0], Stepper(again, 1, 16).step({0: IDS})[0])


def test_every_missing_misshapen_and_stray_tensor_is_named() -> None:
    tensors = random_tensors(SPEC)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(23, np.float32)
    tensors["model.layers.2.extra"] = np.ones(1, np.float32)
    with pytest.raises(WeightsError) as error:
        build(SPEC, tensors)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight: [23]", "model.layers.2.extra"):
        assert name in str(error.value)


def test_stored_inverse_frequencies_are_ignored() -> None:
    tensors = random_tensors(SPEC)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    build(SPEC, tensors)


def test_explicit_head_dim_sizes_the_projections() -> None:
    spec = replace(SPEC, hidden_size=512, num_heads=9, num_kv_heads=1, head_dim=56)
    assert expected_shapes(spec)["model.layers.0.self_attn.q_proj.weight"] == (504, 512)
    assert random_model(spec).layers[0].attention.qkv.out_size == 504 + 2 * 56


@pytest.mark.parametrize("tied", [True, False])
def test_counts(tied: bool) -> None:
    spec = replace(SPEC, qkv_bias=True, tie_word_embeddings=tied)
    shapes = expected_shapes(spec)
    model = random_model(spec)
    assert model.num_parameters == sum(int(np.prod(shape)) for shape in shapes.values())
    streamed = [n for n in shapes if "norm" not in n and (tied or "embed" not in n)]
    assert model.weight_bytes == 4 * sum(int(np.prod(shapes[name])) for name in streamed)
    assert len(model.attention_layers) == 2


def test_windows_reach_the_layers() -> None:
    model = random_model(replace(SPEC, windows=(None, 7)))
    assert [layer.window for layer in model.attention_layers] == [None, 7]


def test_supported_is_listed_with_formats(capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.main import main

    assert main(["models", "--supported"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["family", "formats", "for", "example"]
    assert [line.split()[0] for line in lines[1:]] == list(supported())
    assert any(line.startswith("gemma3") and "HF, GGUF" in line and "Gemma 3 270M" in line for line in lines)
