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
from headrace.loading.json_file import read_json
from headrace.models.spec import ModelSpec, RopeSpec

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as query heads
_REQUIRED = object()


class _Reader:
    """Typed access to a JSON object; errors name the file and the key."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values, self.where = values, where

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {problem}")

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        """A positive integer; `default` where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite positive number; `default` where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.error(f"{key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value


def read_config(path: str | Path) -> ModelSpec:
    """The spec in a config.json alone; `eos_token_ids` and the like are only what that file says."""
    return spec_from_config(read_json(Path(path)), where=str(path))


def spec_from_config(config: dict[str, Any], *, where: str = "config.json", eos: Iterable[int] = ()) -> ModelSpec:
    """ModelSpec of a config. `eos` are end-of-sequence ids from other files (they are joined). CheckpointError."""
    read = _Reader(config, where)
    family = _family(read)
    hidden, num_heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    num_layers = read.integer("num_hidden_layers")
    default_kv = DEFAULT_KV_HEADS.get(family, num_heads) if "num_key_value_heads" not in config else num_heads
    num_kv_heads = read.integer("num_key_value_heads", default_kv)
    if num_heads % num_kv_heads:
        raise read.error(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    max_position = read.integer("max_position_embeddings", 2048 if family == "llama" else 32768)
    head_dim = _head_dim(read, family, hidden, num_heads)
    activation = ACTIVATIONS.get(str(config.get("hidden_act", "silu")))
    if activation is None:
        raise read.error(f"hidden_act {config['hidden_act']!r} is not supported ({', '.join(ACTIVATIONS)} are)")
    bias = read.flag("attention_bias", False) and family in ("llama", "qwen3")
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
        rope=read_rope(config, head_dim=head_dim, max_position=max_position, where=where),
        activation=activation,
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=read.flag("mlp_bias", False) and family == "llama",
        qk_norm=family == "qwen3",
        windows=_windows(read, family, num_layers),
        bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        eos_token_ids=frozenset(token_ids(config.get("eos_token_id"))) | frozenset(eos),
    )


def read_rope(config: dict[str, Any], *, head_dim: int, max_position: int, where: str = "config.json") -> RopeSpec:
    """RopeSpec from `rope_scaling`, else `rope_parameters`; a kind that is not known is refused, not ignored."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{where}: rope_parameters must be an object, not {given!r:.60}")
    if any(isinstance(value, dict) for value in given.values()):
        raise CheckpointError(f"{where}: RoPE that differs between layers is not supported")
    read, top = _Reader(given, f"{where}: RoPE"), _Reader(config, where)
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
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
    values["factor"] = read.number("factor", ratio if kind in ("yarn", "longrope") else _REQUIRED)
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


def _family(read: _Reader) -> str:
    named = read.values.get("architectures")
    names = named if isinstance(named, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = f"the architecture {', '.join(map(str, names))} is" if names else "architectures is missing: the model is"
    raise read.error(f"{found} not supported (these are: {', '.join(ARCHITECTURES)})")


def _head_dim(read: _Reader, family: str, hidden: int, num_heads: int) -> int:
    """head_dim where it is given, else hidden / heads (qwen3: 128 where the key is absent, as in transformers)."""
    if family == "qwen3" and "head_dim" not in read.values:
        return 128
    found = read.integer("head_dim", None)
    if found is None:
        if hidden % num_heads:
            raise read.error(f"head_dim is missing and hidden_size {hidden} does not divide by {num_heads} heads")
        found = hidden // num_heads
    if found % 2:
        raise read.error(f"head_dim must be even for rotary embeddings, not {found}")
    return found


def _windows(read: _Reader, family: str, num_layers: int) -> tuple[int | None, ...]:
    if family == "mistral":
        window = read.integer("sliding_window", None if "sliding_window" in read.values else 4096)
        return (window,) * num_layers if window else ()
    if family not in ("qwen2", "qwen3") or not read.flag("use_sliding_window", False):
        return ()
    window = read.integer("sliding_window", None if "sliding_window" in read.values else 4096)
    if window is None:
        return ()
    kinds = read.values.get("layer_types")
    if kinds is None:
        first = read.values.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise read.error(f"max_window_layers must be an integer, not {first!r}")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise read.error(f"layer_types must name each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise read.error(f"the layer type {kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _factors(read: _Reader, key: str, count: int) -> tuple[float, ...]:
    values = read.values.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise read.error(f"{key} must list {count} numbers")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value > 0 for value in values):
        raise read.error(f"{key} must hold positive numbers")
    return tuple(map(float, values))
