"""DummyCheckpoint: random weights for a spec, to try a model's shapes, speed and memory without its files."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from headrace.models.spec import ModelSpec, MoESpec

if TYPE_CHECKING:
    import torch

STD = 0.05


LAYER_NORMS = {
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma2": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
LAYER_NORMS["gemma3"] = LAYER_NORMS["gemma2"]
DEFAULT_NORMS = ("input_layernorm", "post_attention_layernorm")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model with this spec, by the names it is published under, with its shape."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}.weight": (hidden,) for norm in LAYER_NORMS.get(spec.family, DEFAULT_NORMS)}
        inside = _attention(spec)
        moe = spec.layer_moe(layer)
        inside |= _gated_mlp(spec) if moe is None else _experts(spec, moe)
        shapes |= {prefix + name: shape for name, shape in inside.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def _attention(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    sizes = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    if spec.fused_projections:
        sizes = {"qkv_proj": spec.q_size + 2 * spec.kv_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in sizes.items():
        shapes |= _linear(f"self_attn.{name}", rows, spec.hidden_size, spec.qkv_bias)
    shapes |= _linear("self_attn.o_proj", spec.hidden_size, spec.q_size, spec.output_bias)
    if spec.qk_norm:
        whole = spec.qk_norm_whole
        shapes["self_attn.q_norm.weight"] = (spec.q_size if whole else spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.kv_size if whole else spec.head_dim,)
    if spec.attention_sinks:
        shapes["self_attn.sinks"] = (spec.num_heads,)
    return shapes


def _gated_mlp(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    inner, hidden, bias = spec.intermediate_size, spec.hidden_size, spec.mlp_bias
    if spec.fused_projections:
        shapes = _linear("mlp.gate_up_proj", 2 * inner, hidden, bias)
    else:
        shapes = _linear("mlp.gate_proj", inner, hidden, bias) | _linear("mlp.up_proj", inner, hidden, bias)
    return shapes | _linear("mlp.down_proj", hidden, inner, bias)


def _experts(spec: ModelSpec, moe: MoESpec) -> dict[str, tuple[int, ...]]:
    num, inner, hidden = moe.num_experts, moe.intermediate_size, spec.hidden_size
    if spec.family == "gpt_oss":
        return {
            **_linear("mlp.router", num, hidden, moe.router_bias),
            "mlp.experts.gate_up_proj": (num, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (num, 2 * inner),
            "mlp.experts.down_proj": (num, inner, hidden),
            "mlp.experts.down_proj_bias": (num, hidden),
        }
    mixtral = spec.family == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    shapes = _linear(f"{block}.gate", num, hidden, moe.router_bias)
    for expert in range(num):
        name = f"{block}.experts.{expert}"
        shapes |= _linear(f"{name}.{gate}", inner, hidden, False) | _linear(f"{name}.{up}", inner, hidden, False)
        shapes |= _linear(f"{name}.{down}", hidden, inner, False)
    return shapes


class DummyCheckpoint:
    """A Checkpoint of made-up weights: the same for the same spec, seed and name, in whatever order they are read.

    Norms scale by about 1, everything else around 0 with a standard deviation of 0.05.
    """

    def __init__(self, spec: ModelSpec, seed: int = 0):
        self.spec = spec
        self.seed = seed
        self._shapes = tensor_shapes(spec)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        random = np.random.default_rng((self.seed, zlib.crc32(name.encode())))
        values = random.standard_normal(self._shapes[name], np.float32)
        values *= np.float32(STD)
        if name.endswith("norm.weight"):
            values += np.float32(1.0 - self.spec.norm_offset)
        return values

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Numbers of the same kind, made where `target` is: billions of them in a moment. Not those of `read`."""
        import torch

        seed = zlib.crc32(f"{self.seed} {name}".encode())
        target.normal_(0.0, STD, generator=torch.Generator(target.device).manual_seed(seed))
