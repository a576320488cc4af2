"""config.json of a Hugging Face folder -> ModelSpec.

Both spellings are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before). What a config
leaves out means what transformers' config class of that family means by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace.loading.errors import CheckpointError
from headrace.loading.hf_families import (
    BIASED_ATTENTION,
    DEFAULTS,
    Reader,
    family_of,
    layer_windows,
    read_moe,
    text_model,
)
from headrace.loading.json_file import read_json
from headrace.models.spec import ModelSpec, RopeSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SWIGLU = (1.702, 7.0)  # alpha and limit of the clamped SwiGLU that there is
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def read_config(path: str | Path) -> ModelSpec:
    """The spec in a config.json alone; `eos_token_ids` and the like are only what that file says."""
    return spec_from_config(read_json(Path(path)), where=str(path))


def spec_from_config(config: dict[str, Any], *, where: str = "config.json", eos: Iterable[int] = ()) -> ModelSpec:
    """ModelSpec of a config. `eos` are end-of-sequence ids from other files (they are joined). CheckpointError."""
    config = text_model(config)
    family = family_of(Reader(config, where))
    config = DEFAULTS[family] | config
    read = Reader(config, where)
    _refuse(read, family)
    hidden, num_heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    num_layers = read.integer("num_hidden_layers")
    num_kv_heads = read.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise read.error(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    max_position = read.integer("max_position_embeddings", 32768)
    head_dim = _head_dim(read, hidden, num_heads)
    named = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if not isinstance(named, str) or named not in ACTIVATIONS:
        raise read.error(f"hidden_act {named!r} is not supported ({', '.join(ACTIVATIONS)} are)")
    bias = read.flag("attention_bias", False) and family in BIASED_ATTENTION
    gemma = family in ("gemma2", "gemma3")
    rope, local_rope = _ropes(config, family, head_dim=head_dim, max_position=max_position, where=where)
    return ModelSpec(
        family=family,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=rope,
        activation="swiglu_clamped" if family == "gpt_oss" else ACTIVATIONS[named],
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=read.flag("mlp_bias", False) and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3", "olmo2", "olmoe"),
        qk_norm_whole=family in ("olmo2", "olmoe"),
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=read.number("query_pre_attn_scalar") ** -0.5 if gemma else None,
        attention_soft_cap=read.number("attn_logit_softcapping", None) if family == "gemma2" else None,
        logit_soft_cap=read.number("final_logit_softcapping", None) if gemma else None,
        attention_sinks=family == "gpt_oss",
        fused_projections=family == "phi3",
        windows=layer_windows(read, family, num_layers),
        local_rope=local_rope,
        moe=read_moe(read, family, num_layers),
        bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        eos_token_ids=frozenset(token_ids(config.get("eos_token_id"))) | frozenset(eos),
    )


def _refuse(read: Reader, family: str) -> None:
    """CheckpointError for settings of a family that would be ignored silently."""
    if family == "olmoe" and read.values.get("clip_qkv") is not None:
        raise read.error("clip_qkv is not supported")
    if family in ("gemma2", "gemma3") and read.flag("use_bidirectional_attention", False):
        raise read.error("use_bidirectional_attention makes an encoder of it: only causal models are supported")
    if family == "gpt_oss":
        alpha, limit = read.number("swiglu_alpha", SWIGLU[0]), read.number("swiglu_limit", SWIGLU[1])
        if (alpha, limit) != SWIGLU:
            raise read.error(f"swiglu_alpha {alpha} and swiglu_limit {limit} are not supported, only {SWIGLU}")


def _ropes(config: dict[str, Any], family: str, **known: Any) -> tuple[RopeSpec, RopeSpec | None]:
    """RoPE of full layers, and of window layers where it is another one (Gemma 3)."""
    if family != "gemma3":
        return read_rope(config, **known), None
    kinds = config.get("rope_parameters")
    if isinstance(kinds, dict) and any(isinstance(value, dict) for value in kinds.values()):
        both = [
            kinds.get("full_attention") or {"rope_theta": 1_000_000.0},
            kinds.get("sliding_attention") or {"rope_theta": 10_000.0},
        ]
        plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
        full, local = (read_rope(plain | {"rope_parameters": each}, **known) for each in both)
        return full, local
    base = {"rope_theta": config.get("rope_local_base_freq") or 10_000.0}
    return read_rope(config, **known), read_rope(base, **known)


def read_rope(config: dict[str, Any], *, head_dim: int, max_position: int, where: str = "config.json") -> RopeSpec:
    """RopeSpec from `rope_scaling`, else `rope_parameters`; a kind that is not known is refused, not ignored."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{where}: rope_parameters must be an object, not {given!r:.60}")
    if any(isinstance(value, dict) for value in given.values()):
        raise CheckpointError(f"{where}: RoPE that differs between layers is not supported")
    read, top = Reader(given, f"{where}: RoPE"), Reader(config, where)
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" or (kind == "yarn" and "short_factor" in given) else kind  # early Phi-3
    if kind not in ROPE_KINDS:
        raise read.error(f"the kind {kind!r} is not supported ({', '.join(ROPE_KINDS)} are)")
    theta = read.number("rope_theta", None) or top.number("rope_theta", 10_000.0)
    partial = read.number("partial_rotary_factor", None) or top.number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial)
    values: dict[str, Any] = {"theta": theta, "rotary_dim": None if rotary_dim == head_dim else rotary_dim}
    values["kind"] = kind
    if kind == "default":
        return RopeSpec(**values)
    original = top.integer("original_max_position_embeddings", None) if kind in ("yarn", "llama3", "longrope") else None
    original = original or read.integer("original_max_position_embeddings", max_position)
    if kind == "dynamic":
        original = max_position
    ratio = max_position / original
    values["factor"] = read.number("factor", ratio) if kind in ("yarn", "longrope") else read.number("factor")
    if kind != "linear":
        values["original_max_position"] = original
    if kind in ("yarn", "longrope"):
        values["attention_factor"] = read.number("attention_factor", None)
    if kind == "yarn":
        values |= {"beta_fast": read.number("beta_fast", 32.0), "beta_slow": read.number("beta_slow", 1.0)}
        values |= {key: given.get(key) and read.number(key) for key in ("mscale", "mscale_all_dim")}
        values["truncate"] = read.flag("truncate", True)
    if kind == "llama3":
        values |= {key: read.number(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "longrope":
        values |= {key: _factors(read, key, rotary_dim // 2) for key in ("short_factor", "long_factor")}
    return RopeSpec(**values)


def token_ids(value: Any) -> tuple[int, ...]:
    """Ids of a config's *_token_id: an integer, a list of integers or null. Negative ones mean none."""
    found = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(id for id in found if isinstance(id, int) and not isinstance(id, bool) and id >= 0)


def _head_dim(read: Reader, hidden: int, num_heads: int) -> int:
    """head_dim where it is given, else hidden / heads."""
    found = read.integer("head_dim", None)
    if found is None:
        if hidden % num_heads:
            raise read.error(f"head_dim is missing and hidden_size {hidden} does not divide by {num_heads} heads")
        found = hidden // num_heads
    if found % 2:
        raise read.error(f"head_dim must be even for rotary embeddings, not {found}")
    return found


def _factors(read: Reader, key: str, count: int) -> tuple[float, ...]:
    values = read.values.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise read.error(f"{key} must list {count} numbers")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value > 0 for value in values):
        raise read.error(f"{key} must hold positive numbers")
    return tuple(map(float, values))
