"""GGUF metadata and tensor shapes -> ModelSpec.

Source: the key names of the GGUF specification (ggml-org/ggml, docs/gguf.md). Mistral files say llama. Biases, norms
of queries and keys and an untied output matrix are told by their tensors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headrace.loading.errors import CheckpointError
from headrace.loading.gguf_file import GGUFArray, GGUFFile
from headrace.models.spec import ModelSpec, RopeSpec

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The model in a GGUF file; CheckpointError names the key that is missing or wrong."""
    family = file.text("general.architecture")
    if family not in FAMILIES:
        raise CheckpointError(f"{file.path}: the architecture {family!r} is not supported ({', '.join(FAMILIES)} are)")
    read = _Keys(file, family)
    if read.integer("expert_count", 0):
        raise CheckpointError(f"{file.path}: mixtures of experts are not supported yet")
    hidden, num_heads = read.integer("embedding_length"), read.integer("attention.head_count")
    num_layers = read.integer("block_count")
    num_kv_heads = read.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{file.path}: {num_heads} heads cannot share {num_kv_heads} key/value heads evenly")
    head_dim = read.integer("attention.key_length", 0)
    if not head_dim:
        if hidden % num_heads:
            raise CheckpointError(f"{file.path}: {family}.attention.key_length is missing, {hidden} / {num_heads}")
        head_dim = hidden // num_heads
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: values of another size than keys are not supported")
    if head_dim % 2:
        raise CheckpointError(f"{file.path}: head_dim must be even for rotary embeddings, not {head_dim}")
    max_position = read.integer("context_length")
    window = read.integer("attention.sliding_window", 0) if family == "llama" else 0
    tensors = file.tensors
    return ModelSpec(
        family=family,
        vocab_size=file.info("token_embd.weight").shape[0],
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        max_position=max_position,
        rope=_rope(file, read, head_dim, max_position),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        windows=(window,) * num_layers if window else (),
        bos_token_id=file.integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=frozenset(
            id for key in EOS_KEYS if (id := file.integer(f"tokenizer.ggml.{key}")) is not None and id >= 0
        ),
    )


class _Keys:
    """Keys under the architecture's prefix; integers may be given per layer if all layers agree."""

    def __init__(self, file: GGUFFile, prefix: str):
        self._file, self._prefix = file, prefix

    def integer(self, name: str, default: int | None = None) -> int:
        key = f"{self._prefix}.{name}"
        value: Any = self._file.metadata.get(key)
        if isinstance(value, GGUFArray):
            values = np.unique(self._file.numbers(key))
            if len(values) != 1 or not np.issubdtype(values.dtype, np.integer):
                raise CheckpointError(f"{self._file.path}: {key} differs between layers, which is not supported")
            value = int(values[0])
        else:
            value = self._file.integer(key, default)
        if value is None:
            raise CheckpointError(f"{self._file.path}: key {key!r} is missing")
        if value < 0 or (value == 0 and default != 0):
            raise CheckpointError(f"{self._file.path}: key {key!r} must be positive, not {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        key = f"{self._prefix}.{name}"
        value = self._file.number(key, default)
        if value is None:
            raise CheckpointError(f"{self._file.path}: key {key!r} is missing")
        return value

    def text(self, name: str, default: str) -> str:
        return self._file.text(f"{self._prefix}.{name}", default) or default


def _rope(file: GGUFFile, read: _Keys, head_dim: int, max_position: int) -> RopeSpec:
    rotary_dim = read.integer("rope.dimension_count", head_dim)
    theta = read.number("rope.freq_base", 10_000.0)
    if theta <= 0 or rotary_dim > head_dim or rotary_dim % 2:
        raise CheckpointError(f"{file.path}: rope.freq_base {theta} or rope.dimension_count {rotary_dim} is impossible")
    factor = read.number("rope.scaling.factor", 0.0) or read.number("rope.scale_linear", 1.0) or 1.0
    named = read.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    kind = ROPE_KINDS.get(named)
    if kind is None:
        raise CheckpointError(f"{file.path}: the RoPE scaling {named!r} is not supported ({', '.join(ROPE_KINDS)} are)")
    values: dict[str, Any] = {"theta": theta, "rotary_dim": None if rotary_dim == head_dim else rotary_dim}
    divisors, short, long = (_factors(file, name, rotary_dim // 2) for name in ROPE_TENSORS)
    values["divisors"] = divisors
    if kind == "default" and short and long:
        kind = "longrope"
    values["kind"] = kind
    if kind == "default":
        return RopeSpec(**values)
    original = read.integer("rope.scaling.original_context_length", max_position)
    values["factor"] = factor
    if kind == "longrope":
        values |= {"short_factor": short, "long_factor": long, "factor": max_position / original}
    if kind != "linear":
        values["original_max_position"] = original
        extra = read.number("rope.scaling.attn_factor", 0.0)
        if kind == "yarn":
            values["beta_fast"] = read.number("rope.scaling.yarn_beta_fast", 32.0)
            values["beta_slow"] = read.number("rope.scaling.yarn_beta_slow", 1.0)
            if extra:  # multiplies the derived factor here; Hugging Face's attention_factor replaces it
                extra *= 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
        values["attention_factor"] = extra or None
    return RopeSpec(**values)


def _factors(file: GGUFFile, name: str, count: int) -> tuple[float, ...]:
    if name not in file.tensors:
        return ()
    values = file.read(name).ravel()
    if len(values) != count or not (values > 0).all():
        raise CheckpointError(f"{file.path}: tensor {name!r} must hold {count} positive numbers")
    return tuple(float(value) for value in values)
