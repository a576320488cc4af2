"""GGUF metadata and tensor shapes -> ModelSpec.

Source: the key names of the GGUF specification (ggml-org/ggml, docs/gguf.md). Mistral files say llama. Biases, norms
of queries and keys and an untied output matrix are told by their tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.loading.errors import CheckpointError
from headrace.loading.gguf_file import GGUFArray, GGUFFile
from headrace.models.spec import MOST_LAYERS, MOST_OF_ANYTHING, ModelSpec, MoESpec, RopeSpec

FAMILIES = {  # general.architecture -> family; a llama with experts is a mixtral
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "gpt-oss": "gpt_oss",
}
# Models whose scores are scaled by hidden / heads instead of head_dim; no key says so, llama.cpp knows them by depth.
SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}  # the 27B of either
GEMMA2_CAPS = (50.0, 30.0)  # of attention and of logits, where the file does not say
PERIODS = {"gemma2": 2, "gemma3": 6, "gpt_oss": 2}  # every so many layers one sees everything; the last of its period
LOCAL_THETA = 10_000.0  # Gemma 3's window layers, where the file does not say
ROPE_KINDS = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The model in a GGUF file; CheckpointError names the key that is missing or wrong."""
    architecture = file.text("general.architecture")
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"{file.path}: the architecture {architecture!r} is not supported ({known} are)")
    family = FAMILIES[architecture]
    read = _Keys(file, architecture)
    if family == "llama" and read.integer("expert_count", 0):
        family = "mixtral"
    hidden, num_heads = read.integer("embedding_length"), read.integer("attention.head_count")
    num_layers = read.integer("block_count")
    num_kv_heads = read.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{file.path}: {num_heads} heads cannot share {num_kv_heads} key/value heads evenly")
    head_dim = read.integer("attention.key_length", 0)
    if not head_dim:
        if hidden % num_heads:
            key = f"{architecture}.attention.key_length"
            raise CheckpointError(f"{file.path}: {key} is missing, {hidden} / {num_heads}")
        head_dim = hidden // num_heads
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: values of another size than keys are not supported")
    if head_dim % 2:
        raise CheckpointError(f"{file.path}: head_dim must be even for rotary embeddings, not {head_dim}")
    max_position = read.integer("context_length")
    tensors = file.tensors
    gemma = family in ("gemma2", "gemma3")
    rope = _rope(file, read, head_dim, max_position)
    if family == "gpt_oss":
        rope = replace(rope, truncate=False)  # as in the model's config; no key says so
    local_rope = None
    if family == "gemma3":
        local_rope = RopeSpec(theta=read.number("rope.freq_base_swa", LOCAL_THETA), rotary_dim=rope.rotary_dim)
    attention_cap, logit_cap = GEMMA2_CAPS if family == "gemma2" else (0.0, 0.0)
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
        rope=rope,
        activation="gelu_tanh" if gemma else "swiglu_clamped" if family == "gpt_oss" else "silu",
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qk_norm_whole=family in ("olmo2", "olmoe"),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=(hidden / num_heads) ** -0.5 if SCALED_BY_HIDDEN.get(family) == num_layers else None,
        attention_soft_cap=read.number("attn_logit_softcapping", attention_cap) or None if gemma else None,
        logit_soft_cap=read.number("final_logit_softcapping", logit_cap) or None if gemma else None,
        attention_sinks=family == "gpt_oss",
        fused_projections=family == "phi3",
        windows=_windows(file, read, family, num_layers),
        local_rope=local_rope,
        moe=_moe(file, read, family, num_layers),
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
        most = MOST_LAYERS if name == "block_count" else MOST_OF_ANYTHING
        if value > most:
            raise CheckpointError(f"{self._file.path}: key {key!r} is {value}, more than the {most} that any model has")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        key = f"{self._prefix}.{name}"
        value = self._file.number(key, default)
        if value is None:
            raise CheckpointError(f"{self._file.path}: key {key!r} is missing")
        return value

    def text(self, name: str, default: str) -> str:
        return self._file.text(f"{self._prefix}.{name}", default) or default


def _windows(file: GGUFFile, read: _Keys, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Window of each layer; () where none has one, and for families whose files name one that is not used."""
    window = read.integer("attention.sliding_window", 0)
    if not window or family in ("qwen2", "qwen3", "qwen3_moe"):
        return ()
    if family in ("llama", "mixtral", "phi3"):
        return (window,) * num_layers
    if family not in PERIODS:
        raise CheckpointError(f"{file.path}: a {family} model with sliding windows is not supported (OLMo 3 is one)")
    key = f"{file.text('general.architecture')}.attention.sliding_window_pattern"
    if isinstance(file.metadata.get(key), GGUFArray):
        listed = file.numbers(key)
        if len(listed) != num_layers:
            raise CheckpointError(f"{file.path}: key {key!r} must name each of {num_layers} layers")
        return tuple(window if local else None for local in listed.tolist())
    period = read.integer("attention.sliding_window_pattern", PERIODS[family])
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def _moe(file: GGUFFile, read: _Keys, family: str, num_layers: int) -> MoESpec | None:
    """The experts of a family that has them; layers without a router are ordinary ones."""
    if family not in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss"):
        if read.integer("expert_count", 0):
            raise CheckpointError(f"{file.path}: a {family} model with experts is not supported")
        return None
    tensors = file.tensors
    routed = [layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in tensors]
    if not routed or f"blk.{routed[0]}.ffn_gate_exps.weight" not in tensors:
        raise CheckpointError(f"{file.path}: has no merged experts; convert it again with a llama.cpp of 2024 or later")
    num, chosen = read.integer("expert_count"), read.integer("expert_used_count")
    if chosen > num:
        raise CheckpointError(f"{file.path}: a token cannot have {chosen} of {num} experts")
    return MoESpec(
        num_experts=num,
        experts_per_token=chosen,
        intermediate_size=file.info(f"blk.{routed[0]}.ffn_gate_exps.weight").shape[1],
        normalise=bool(file.flag(f"{file.text('general.architecture')}.expert_weights_norm", family != "olmoe")),
        router_bias=f"blk.{routed[0]}.ffn_gate_inp.bias" in tensors,
        expert_bias=f"blk.{routed[0]}.ffn_gate_exps.bias" in tensors,
        dense_layers=frozenset(range(num_layers)) - frozenset(routed),
    )


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
