"""The attention block: projections, norms and rotation. The attention itself is behind one hook, `attend`."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace import ops
from headrace.attention.base import LayerAttention
from headrace.layers.linear import Linear, MergedLinear, Shard, Split
from headrace.layers.norm import RMSNorm
from headrace.layers.weights import WeightSource
from headrace.models.spec import ModelSpec
from headrace.ops.xp import Array
from headrace.quant.base import QuantScheme


class Attend(Protocol):
    """A step's attention, for every layer."""

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """[T, q_size] of q [T, q_size], k and v [T, kv_size], rotated: writes k and v into the cache and attends over
        it. q, k and v may be views whose tokens lie apart."""
        ...

    # May have `fused: Fused`: the same from the projection on, for a backend that takes rotation and the norms of heads
    # upon itself.


class Fused(Protocol):
    """Norms of heads, rotation, cache and attention in one."""

    def __call__(self, layer: int, qkv: Array, angles: tuple[Array, Array], norms: tuple[RMSNorm, ...]) -> Array:
        """[T, q_size] of qkv [T, q | k | v] or [parts, T, q | k | v], whose parts are still to be added up; `norms` of
        each head of q and of k, or none."""
        ...


class Attention:
    """Self-attention with rotary positions, grouped heads and, where the spec says so, norms of q and k, and sinks."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        prefix: str,
        scheme: QuantScheme,
        layer: int,
        in_size: int | None = None,
    ):
        """`in_size` numbers of a token come in; None: the spec's hidden size, which is what comes out."""
        self.index = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_size, self.kv_size = spec.q_size, spec.kv_size
        self.sinks = None
        if spec.attention_sinks:
            self.sinks = source.place(
                np.ascontiguousarray(source.take(f"{prefix}.sinks", (spec.num_heads,)), np.float32)
            )
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
        self._fusable = not (spec.qk_norm and spec.qk_norm_whole)
        self.qkv = MergedLinear(source, shards, in_size or spec.hidden_size, scheme)
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
        """x [T, H] -> [T, H], perhaps in parts (Linear.partial); cos and sin [T, R/2] by token."""
        if self._fusable and (fused := getattr(attend, "fused", None)) is not None:
            return self.out.partial(fused(self.index, self.qkv.partial(x), (cos, sin), self.norms))
        qkv = self.qkv(x)
        rotated = self.q_size + self.kv_size
        q, k, v = qkv[:, : self.q_size], qkv[:, self.q_size : rotated], qkv[:, rotated:]
        for norm, part in zip(self.norms, (q, k), strict=False):
            groups = part.reshape(part.shape[0], -1, norm.size)  # a view: each head, or all of them at once
            norm(groups, out=groups)
        heads = qkv[:, :rotated].reshape(-1, self.num_heads + self.num_kv_heads, self.head_dim)  # a view of q and k
        ops.rope(heads, cos, sin, out=heads)
        mixed = attend(self.index, q, k, v)
        return self.out.partial(mixed)

    @property
    def num_parameters(self) -> int:
        sinks = 0 if self.sinks is None else self.num_heads
        norms = sum(norm.num_parameters for norm in self.norms)
        return self.qkv.num_parameters + self.out.num_parameters + norms + sinks

    @property
    def weight_bytes(self) -> int:
        """Bytes that one call reads of the linear layers."""
        return self.qkv.weight_bytes + self.out.weight_bytes
