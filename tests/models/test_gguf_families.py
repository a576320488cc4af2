"""Every family from a GGUF file: written from a transformers model's weights as llama.cpp's conversion writes them,
under the names that the gguf package maps them to; run against transformers and our model of the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.errors import CheckpointError
from headrace.loading.gguf_spec import FAMILIES
from headrace.models.blocks import CausalLM
from headrace.models.registry import build_model, supported
from models.harness import Stepper
from models.oracles import SHAPE, assert_close, oracle, oracle_logits, ours, prompt, published
from models.test_families import EXPERTS, GEMMA3, GPT_OSS, GPT_YARN, LINEAR_GLOBAL, PHI_LONGROPE, PHI_PARTIAL, QWEN_MOE

LENGTH = 150
GEMMA: dict[str, Any] = dict(GEMMA3, query_pre_attn_scalar=8)  # what a GGUF file can say: head_dim
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama-biases-tied": ("llama", "llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "mistral": ("llama", "mistral", dict(sliding_window=40)),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", dict(head_dim=12)),
    "phi3": ("phi3", "phi3", dict(rope_parameters=PHI_PARTIAL, sliding_window=40)),
    "phi3-longrope": ("phi3", "phi3", dict(original_max_position_embeddings=64, rope_parameters=PHI_LONGROPE)),
    "olmo2": ("olmo2", "olmo2", {}),
    "gemma2": ("gemma2", "gemma2", dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": ("gemma3", "gemma3", dict(GEMMA, num_hidden_layers=7, rope_parameters=LINEAR_GLOBAL)),
    "mixtral": ("llama", "mixtral", dict(EXPERTS, num_local_experts=5)),
    "qwen3moe": ("qwen3moe", "qwen3_moe", dict(QWEN_MOE, norm_topk_prob=True)),
    "olmoe": ("olmoe", "olmoe", dict(EXPERTS, num_experts=6)),
    "gpt-oss": ("gpt-oss", "gpt_oss", dict(GPT_OSS, rope_parameters=GPT_YARN)),
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of Q and K in its llama models: row i and i + d/2 of a head become neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def converted(arch: str, config: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A published checkpoint's tensors with their values as GGUF stores them, under names the gguf package can map."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        values = tensors[name]
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if arch == "llama" and ".q_proj." in name:
            values = interleave(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = interleave(values, config.num_key_value_heads)
        before, middle, after = name.partition(".experts.")
        if arch == "gpt-oss" and middle:
            part, biased = after.removesuffix("_bias"), after.endswith("_bias")
            values = values if biased else values.swapaxes(1, 2)
            kind = "bias" if biased else "weight"
            halves = {part: values}
            if part == "gate_up_proj":
                halves = {"gate_proj": values[:, ::2], "up_proj": values[:, 1::2]}
            found |= {f"{before}.experts.{half}.{kind}": np.ascontiguousarray(each) for half, each in halves.items()}
        elif middle:
            experts.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(values)
        else:
            found[name + ".weight" * name.endswith("sinks")] = values
    return found | {name: np.stack(each) for name, each in experts.items()}


def write_gguf(path: Path, arch: str, model: Any, quantise: gguf.GGMLQuantizationType | None = None) -> Path:
    """The model as a GGUF file; experts as `quantise`, if given."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if chosen := getattr(config, "num_experts_per_tok", None):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(chosen)
        if arch == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "longrope":
        ratio = config.max_position_embeddings / config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(
            (1 + np.log(ratio) / np.log(config.original_max_position_embeddings)) ** 0.5
        )
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in converted(arch, config, published(model)).items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        if quantise is not None and "_exps.weight" in own:
            writer.add_tensor(own, gguf.quants.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> CausalLM:
    checkpoint = open_checkpoint(path)
    return build_model(checkpoint.spec, WeightSource(checkpoint))


@pytest.mark.parametrize("case", CASES)
def test_gguf_and_folder_give_the_same_bits(case: str, tmp_path: Path) -> None:
    arch, family, changes = CASES[case]
    reference = oracle(family, **changes)
    found = load(write_gguf(tmp_path / "m.gguf", arch, reference))
    ids = prompt(LENGTH)
    logits = Stepper(found, 1, LENGTH).step({0: ids})[0]
    assert_close(logits, oracle_logits(reference, ids))
    folder = ours(reference)
    assert found.num_parameters == folder.num_parameters
    if "longrope" not in case:  # the file's attention factor is a float32
        np.testing.assert_array_equal(logits, Stepper(folder, 1, LENGTH).step({0: ids})[0])


def test_every_architecture_is_checked_here_and_said_to_be_supported() -> None:
    assert {arch for arch, _, _ in CASES.values()} == set(FAMILIES)
    from_gguf = {name for name, family in supported().items() if "GGUF" in family.formats}
    assert from_gguf == {family for _, family, _ in CASES.values()}


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_quantised_experts(kind: str, tmp_path: Path) -> None:
    """Rows are blocks of 32, so sizes are multiples of that."""
    quantise = gguf.GGMLQuantizationType[kind]
    reference = oracle("gpt_oss", **dict(GPT_OSS, hidden_size=96, intermediate_size=32, rope_parameters=GPT_YARN))
    found = load(write_gguf(tmp_path / "m.gguf", "gpt-oss", reference, quantise))
    exact = ours(reference).layers[1].mlp.experts.down  # type: ignore[union-attr]
    expected = gguf.quants.dequantize(gguf.quants.quantize(exact, quantise), quantise)
    np.testing.assert_array_equal(found.layers[1].mlp.experts.down, expected)  # type: ignore[union-attr]
    assert not np.array_equal(exact, expected)


@pytest.mark.parametrize(
    ("arch", "family", "layers", "scale"),
    [("gemma2", "gemma2", 46, 8**-0.5), ("gemma3", "gemma3", 62, 8**-0.5), ("gemma3", "gemma3", 26, None)],
)
def test_27b_gemmas_scale_by_hidden_over_heads(
    arch: str, family: str, layers: int, scale: float | None, tmp_path: Path
) -> None:
    reference = oracle(family, **dict(GEMMA, head_dim=4, num_hidden_layers=layers, hidden_size=48))
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", arch, reference)).spec.attention_scale == scale


def refused(tmp_path: Path, arch: str, **keys: int) -> str:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    sizes = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": 8}
    for key, value in (sizes | keys).items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_uint32(f"{arch}.attention.head_count", 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((SHAPE["vocab_size"], 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "m.gguf")
    return str(error.value)


def test_what_is_refused_says_why(tmp_path: Path) -> None:
    assert "'qwen2moe' is not supported (llama, " in refused(tmp_path, "qwen2moe")
    assert "no merged experts; convert it again" in refused(tmp_path, "llama", expert_count=4)
    assert "a qwen2 model with experts" in refused(tmp_path, "qwen2", expert_count=4)
    assert "OLMo 3" in refused(tmp_path, "olmo2", **{"attention.sliding_window": 8})
