"""The attention block: projections, norms and rotation. The attention itself is behind one hook, `attend`."""

from __future__ import annotations

from collections.abc import Callable

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
    """Self-attention with rotary positions, grouped heads and, where the model has them, norms of q and k."""

    def __init__(self, spec: ModelSpec, source: WeightSource, prefix: str, scheme: QuantScheme, layer: int):
        self.index = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_size, self.kv_size = spec.q_size, spec.kv_size
        self.settings = LayerAttention(
            scale=spec.head_dim**-0.5,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window(layer),
        )
        self.qkv = MergedLinear(
            source,
            [
                Shard(f"{prefix}.q_proj", spec.q_size, spec.qkv_bias),
                Shard(f"{prefix}.k_proj", spec.kv_size, spec.qkv_bias),
                Shard(f"{prefix}.v_proj", spec.kv_size, spec.qkv_bias),
            ],
            spec.hidden_size,
            scheme,
        )
        self.out = Linear(
            source, Shard(f"{prefix}.o_proj", spec.hidden_size, spec.output_bias), spec.q_size, scheme, Split.ROW
        )
        self.norms: tuple[RMSNorm, ...] = ()
        if spec.qk_norm:
            names = (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight")
            self.norms = tuple(RMSNorm(source, name, spec.head_dim, spec.norm_eps) for name in names)
        source.ignore(f"{prefix}.rotary_emb.inv_freq")  # old checkpoints store what layers/rope.py computes

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Attend) -> Array:
        """x [T, H] -> [T, H]; cos and sin [T, R/2] are those of the tokens' positions."""
        qkv = self.qkv(x)
        rotated = self.q_size + self.kv_size
        heads = qkv[:, :rotated].reshape(-1, self.num_heads + self.num_kv_heads, self.head_dim)  # a view of q and k
        if self.norms:
            q_heads, k_heads = heads[:, : self.num_heads], heads[:, self.num_heads :]
            self.norms[0](q_heads, out=q_heads)
            self.norms[1](k_heads, out=k_heads)
        ops.rope(heads, cos, sin, out=heads)
        mixed = attend(self.index, qkv[:, : self.q_size], qkv[:, self.q_size : rotated], qkv[:, rotated:])
        return self.out(mixed)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return (self.qkv, self.out)
