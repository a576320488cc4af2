"""DummyCheckpoint: random weights for a spec, to try a model's shapes, speed and memory without its files."""

from __future__ import annotations

import zlib

import numpy as np

from headrace.models.spec import ModelSpec

STD = 0.05


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model with this spec, by Hugging Face's names, with its shape."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    linears = (
        ("self_attn.q_proj", spec.q_size, hidden, spec.qkv_bias),
        ("self_attn.k_proj", spec.kv_size, hidden, spec.qkv_bias),
        ("self_attn.v_proj", spec.kv_size, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, spec.q_size, spec.output_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    )
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if spec.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


class DummyCheckpoint:
    """A Checkpoint of made-up weights: the same for the same spec, seed and name, in whatever order they are read.

    Norms lie around 1, everything else around 0 with a standard deviation of 0.05.
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
            values += np.float32(1.0)
        return values
