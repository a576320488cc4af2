"""The attention block: projections, norms and rotation. The attention itself is behind one hook, `attend`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace import ops
from headrace.attention.base import LayerAttention
from headrace.layers.linear import Linear, MergedLinear, Shard, Split
from headrace.layers.norm import RMSNorm
from headrace.layers.weights import WeightSource
from headrace.models.spec import ModelSpec
from headrace.ops.xp import Array
from headrace.quant.base import QuantScheme

# attend(layer index, q [T, q_size], k [T, kv_size], v [T, kv_size]) -> [T, q_size]: writes k and v into the cache and
# attends over it. q, k and v may be views whose tokens lie apart.
Attend = Callable[[int, Array, Array, Array], Array]


class Attention:
    """Self-attention with rotary positions, grouped heads and, where the spec says so, norms of q and k, and sinks."""

    def __init__(self, spec: ModelSpec, source: WeightSource, prefix: str, scheme: QuantScheme, layer: int):
        self.index = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_size, self.kv_size = spec.q_size, spec.kv_size
        self.sinks = None
        if spec.attention_sinks:
            self.sinks = np.ascontiguousarray(source.take(f"{prefix}.sinks", (spec.num_heads,)), np.float32)
        self.settings = LayerAttention(
            scale=spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window(layer),
            soft_cap=spec.attention_soft_cap,
            sinks=self.sinks,
        )
        sizes = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        if spec.fused_projections:
            sizes = {"qkv_proj": spec.q_size + 2 * spec.kv_size}
        shards = [Shard(f"{prefix}.{name}", size, spec.qkv_bias) for name, size in sizes.items()]
        self.qkv = MergedLinear(source, shards, spec.hidden_size, scheme)
        self.out = Linear(
            source, Shard(f"{prefix}.o_proj", spec.hidden_size, spec.output_bias), spec.q_size, scheme, Split.ROW
        )
        self.norms: tuple[RMSNorm, ...] = ()
        if spec.qk_norm:
            norm_sizes = (spec.q_size, spec.kv_size) if spec.qk_norm_whole else (spec.head_dim, spec.head_dim)
            self.norms = tuple(
                RMSNorm(source, f"{prefix}.{name}.weight", size, spec.norm_eps, spec.norm_offset)
                for name, size in zip(("q_norm", "k_norm"), norm_sizes, strict=True)
            )
        source.ignore(f"{prefix}.rotary_emb.inv_freq")  # old checkpoints store what layers/rope.py computes

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Attend) -> Array:
        """x [T, H] -> [T, H]; cos and sin [T, R/2] are those of the tokens' positions."""
        qkv = self.qkv(x)
        rotated = self.q_size + self.kv_size
        q, k, v = qkv[:, : self.q_size], qkv[:, self.q_size : rotated], qkv[:, rotated:]
        for norm, part in zip(self.norms, (q, k), strict=False):
            groups = part.reshape(part.shape[0], -1, norm.size)  # a view: each head, or all of them at once
            norm(groups, out=groups)
        heads = qkv[:, :rotated].reshape(-1, self.num_heads + self.num_kv_heads, self.head_dim)  # a view of q and k
        ops.rope(heads, cos, sin, out=heads)
        mixed = attend(self.index, q, k, v)
        return self.out(mixed)

    @property
    def num_parameters(self) -> int:
        sinks = 0 if self.sinks is None else self.num_heads
        norms = sum(norm.num_parameters for norm in self.norms)
        return self.qkv.num_parameters + self.out.num_parameters + norms + sinks

    @property
    def weight_bytes(self) -> int:
        """Bytes that one call reads of the linear layers."""
        return self.qkv.weight_bytes + self.out.weight_bytes
