"""L09, the order of Q and K rows, ids that end a text, and safetensors folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import LoadedCheckpoint, open_checkpoint
from headrace.loading.dummy import DummyCheckpoint, tensor_shapes
from headrace.loading.errors import CheckpointError
from headrace.loading.hf_config import spec_from_config
from headrace.loading.names import GGUF_NAMES, hf_name

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
}


def weights(tied: bool, **changes: Any) -> dict[str, np.ndarray]:
    made = DummyCheckpoint(spec_from_config(CONFIG | {"tie_word_embeddings": tied} | changes), seed=1)
    return {name: made.read(name) for name in made.names()}


def folder(tmp_path: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's conversion does to Q and K: row i and i + d/2 of a head become neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_model(path: Path, tensors: dict[str, np.ndarray], arch: str = "llama", **extra: np.ndarray) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(7)
    to_gguf = {hf: own for own, hf in GGUF_NAMES.items()}
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".")
        parts = stem.removeprefix("model.layers.").split(".", 1)
        if stem.startswith("model.layers."):
            own = f"blk.{parts[0]}.{to_gguf[parts[1]]}.{kind}"
            if arch == "llama" and parts[1] in ("self_attn.q_proj", "self_attn.k_proj"):
                values = interleave(values, 4 if "q_proj" in parts[1] else 2)
        else:
            own = f"{to_gguf[stem]}.{kind}"
        writer.add_tensor(own, values)
    for name, values in extra.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(checkpoint: LoadedCheckpoint, tensors: dict[str, np.ndarray]) -> None:
    assert set(checkpoint.names()) == set(tensors)
    for name, values in tensors.items():
        assert tuple(checkpoint.shape(name)) == values.shape
        np.testing.assert_array_equal(checkpoint.read(name), values)
    source = WeightSource(checkpoint)
    for name, shape in tensor_shapes(checkpoint.spec).items():
        source.take(name, shape)
    source.finish()


# L09


def test_tied_without_head(tmp_path: Path) -> None:
    tensors = weights(tied=True)
    checkpoint = open_checkpoint(folder(tmp_path, tensors, tie_word_embeddings=True))
    assert checkpoint.spec.tie_word_embeddings
    assert_same(checkpoint, tensors)


def test_tied_with_a_head_ignores_it(tmp_path: Path) -> None:
    tensors = weights(tied=False)
    checkpoint = open_checkpoint(folder(tmp_path, tensors, tie_word_embeddings=True))
    tensors.pop("lm_head.weight")
    assert_same(checkpoint, tensors)


def test_untied_with_head(tmp_path: Path) -> None:
    tensors = weights(tied=False)
    checkpoint = open_checkpoint(folder(tmp_path, tensors, tie_word_embeddings=False))
    assert not checkpoint.spec.tie_word_embeddings
    assert_same(checkpoint, tensors)


def test_untied_without_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        open_checkpoint(folder(tmp_path, weights(tied=True), tie_word_embeddings=False))


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_ties_where_output_is_absent(tmp_path: Path, tied: bool) -> None:
    tensors = weights(tied)
    checkpoint = open_checkpoint(gguf_model(tmp_path / "m.gguf", tensors))
    assert checkpoint.spec.tie_word_embeddings is tied
    assert_same(checkpoint, tensors)


# GGUF


def test_gguf_llama_rows_are_put_back_with_biases(tmp_path: Path) -> None:
    tensors = weights(tied=True, attention_bias=True)
    checkpoint = open_checkpoint(gguf_model(tmp_path / "m.gguf", tensors))
    assert checkpoint.spec.qkv_bias and checkpoint.spec.output_bias
    assert_same(checkpoint, tensors)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_gguf_qwen_rows_stay(tmp_path: Path, arch: str) -> None:
    tensors = weights(tied=True, architectures=[f"{arch.capitalize()}ForCausalLM"], head_dim=8)
    checkpoint = open_checkpoint(gguf_model(tmp_path / "m.gguf", tensors, arch))
    assert checkpoint.spec.family == arch and checkpoint.spec.qk_norm is (arch == "qwen3")
    assert checkpoint.spec.qkv_bias is (arch == "qwen2")
    assert_same(checkpoint, tensors)


def test_gguf_rope_divisors_and_eos(tmp_path: Path) -> None:
    """N04: a file without scaling metadata that carries the divisors."""
    divisors = np.array([1, 1.25, 8, 8], np.float32)
    tensors = weights(tied=True)
    checkpoint = open_checkpoint(gguf_model(tmp_path / "m.gguf", tensors, rope_freqs__weight=divisors))
    assert checkpoint.spec.rope.divisors == (1.0, 1.25, 8.0, 8.0)
    assert checkpoint.spec.eos_token_ids == {3, 7}
    assert_same(checkpoint, tensors)


def test_unknown_gguf_tensor_is_reported(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        gguf_model(tmp_path / "m.gguf", weights(tied=True), odd__weight=np.ones(4, np.float32))
    )
    assert "odd.weight" in checkpoint.names()
    assert hf_name("blk.3.odd.weight") == "blk.3.odd.weight"


def test_default_model(default_model_path: Path) -> None:
    checkpoint = open_checkpoint(default_model_path)
    spec = checkpoint.spec
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.head_dim) == ("llama", 30, 576, 64)
    assert spec.tie_word_embeddings and spec.eos_token_ids == {2} and spec.rope.theta == 100_000
    shapes = tensor_shapes(spec)
    assert {name: tuple(checkpoint.shape(name)) for name in checkpoint.names()} == shapes
    assert checkpoint.chat_template and "im_start" in checkpoint.chat_template
    assert checkpoint.read("model.layers.0.self_attn.q_proj.weight").dtype == np.float32


# Folders


def test_eos_ids_are_joined_and_generation_is_read(tmp_path: Path) -> None:
    """P12: config, generation_config and the tokenizer's eos."""
    path = folder(tmp_path, weights(tied=True), tie_word_embeddings=True)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 4], "temperature": 0.6, "top_k": None})
    )
    listed = {"9": {"content": "<|end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "added_tokens_decoder": listed}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec.eos_token_ids == {3, 4, 9}
    assert checkpoint.generation == {"temperature": 0.6}
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 8, "content": "<|end|>"}]}))
    assert open_checkpoint(path).spec.eos_token_ids == {3, 4, 8}


def test_shards_and_dtypes(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    tensors = weights(tied=True)
    names = sorted(tensors)
    kinds = [torch.bfloat16, torch.float16, torch.float64, torch.float32]
    stored = {name: torch.tensor(tensors[name]).to(kinds[i % 4]) for i, name in enumerate(names)}
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, members in parts.items():
        save_torch({name: stored[name] for name in members}, str(tmp_path / file))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(open_checkpoint(tmp_path), {name: value.float().numpy() for name, value in stored.items()})
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: b\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "x.bin"])
def test_index_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="refused"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0{}extra"])
def test_damaged_safetensors(tmp_path: Path, damage: bytes) -> None:
    folder(tmp_path, weights(tied=True), tie_word_embeddings=True)
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(tmp_path)


def test_dummy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    one, two = (
        open_checkpoint(f"dummy:{tmp_path}", seed=5),
        open_checkpoint(f"dummy:{tmp_path / 'config.json'}", seed=5),
    )
    assert_same(one, {name: two.read(name) for name in reversed(list(two.names()))})
    assert abs(one.read("model.norm.weight").mean() - 1) < 0.1
    assert abs(one.read("model.embed_tokens.weight").std() - 0.05) < 0.01
    other = open_checkpoint(f"dummy:{tmp_path}", seed=6)
    assert not np.array_equal(one.read("model.norm.weight"), other.read("model.norm.weight"))
