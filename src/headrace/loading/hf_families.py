"""What differs between families in config.json: what absent keys mean, which layers have windows or experts.

Defaults are those of transformers' config classes: a config leaves out what agrees with them (the text_config of
google/gemma-3-4b-it names neither heads nor vocabulary).
"""

from __future__ import annotations

import math
from typing import Any

from headrace.loading.errors import CheckpointError
from headrace.models.spec import MOST_LAYERS, MOST_OF_ANYTHING, MoESpec

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "MiMoForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "GptOssForCausalLM": "gpt_oss",
}
_GEMMA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "olmo2": {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "gemma2": _GEMMA
    | {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": _GEMMA | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0},
    "mixtral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1_000_000.0,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "olmoe": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
BIASED_ATTENTION = ("llama", "qwen3", "olmo2", "gemma2", "gemma3", "qwen3_moe", "olmoe", "gpt_oss")  # attention_bias
_REQUIRED = object()


class Reader:
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
        most = MOST_LAYERS if key == "num_hidden_layers" else MOST_OF_ANYTHING
        if value > most:
            raise self.error(f"{key} is {value}, more than the {most} that any model has")
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


def family_of(read: Reader) -> str:
    """The family of the first known architecture; CheckpointError lists those there are."""
    named = read.values.get("architectures")
    names = named if isinstance(named, list) else []
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if read.values.get("kv_lora_rank"):
        raise read.error(f"{', '.join(map(str, names))} has multi-head latent attention, which is not supported")
    found = f"the architecture {', '.join(map(str, names))} is" if names else "architectures is missing: the model is"
    raise read.error(f"{found} not supported (these are: {', '.join(ARCHITECTURES)})")


def text_model(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model: `text_config` where there is one, under the outer names."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = {key: config[key] for key in ("architectures", "eos_token_id", "bos_token_id") if config.get(key)}
    return inner | outer


def layer_windows(read: Reader, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Window of each layer; () where none has one."""
    window = read.integer("sliding_window", None)
    if window is None or family in ("llama", "olmo2", "olmoe"):
        return ()
    if family in ("qwen2", "qwen3", "qwen3_moe") and not read.flag("use_sliding_window", False):
        return ()
    if family in ("mistral", "phi3", "mixtral", "qwen3_moe"):
        return (window,) * num_layers
    kinds = read.values.get("layer_types")
    if kinds is None:
        return tuple(window if local else None for local in _default_pattern(read, family, num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise read.error(f"layer_types must name each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise read.error(f"the layer type {kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _default_pattern(read: Reader, family: str, num_layers: int) -> list[bool]:
    """Which layers have a window where `layer_types` does not say."""
    if family in ("gemma2", "gpt_oss"):
        return [layer % 2 == 0 for layer in range(num_layers)]
    if family == "gemma3":
        pattern = read.integer("sliding_window_pattern", 6)
        return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    first = read.values.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise read.error(f"max_window_layers must be an integer, not {first!r}")
    return [layer >= first for layer in range(num_layers)]


def read_moe(read: Reader, family: str, num_layers: int) -> MoESpec | None:
    """The experts of a family that has them."""
    if family not in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss"):
        return None
    dense: set[int] = set()
    if family == "qwen3_moe":
        listed = read.values.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
            raise read.error(f"mlp_only_layers must list layers, not {listed!r}")
        step = read.integer("decoder_sparse_step", 1)
        dense = set(listed) | {layer for layer in range(num_layers) if (layer + 1) % step}
    num_experts = read.integer("num_local_experts", None) or read.integer("num_experts")  # the first, if from v5
    per_token = read.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise read.error(f"a token cannot have {per_token} of {num_experts} experts")
    return MoESpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=read.integer("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        normalise=family in ("mixtral", "gpt_oss") or read.flag("norm_topk_prob", False),
        router_bias=family == "gpt_oss",
        expert_bias=family == "gpt_oss",
        dense_layers=frozenset(layer for layer in dense if 0 <= layer < num_layers),
    )
