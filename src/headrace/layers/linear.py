"""Linear layers: which tensors they merge and how they would be split over devices. Methods do the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from headrace.layers.weights import WeightSource
from headrace.ops.registry import Op
from headrace.ops.xp import Array
from headrace.quant.base import QuantScheme


class Split(Enum):
    """How tensor parallelism divides a weight [out, in]."""

    REPLICATED = "replicated"
    COLUMN = "column"  # each device holds some outputs of every shard
    ROW = "row"  # each device holds some inputs; results are summed


@dataclass(frozen=True)
class Shard:
    """One checkpoint module inside a merged weight."""

    name: str  # module name: model.layers.0.self_attn.q_proj
    out_size: int
    bias: bool = False


class MergedLinear:
    """Several linear layers on one input as one product; their outputs lie side by side in shard order."""

    def __init__(
        self,
        source: WeightSource,
        shards: Sequence[Shard],
        in_size: int,
        scheme: QuantScheme,
        split: Split = Split.COLUMN,
    ):
        self.shards = tuple(shards)
        self.in_size = in_size
        self.out_size = sum(shard.out_size for shard in shards)
        self.split = split
        self.method = scheme.linear(shards[0].name)
        self.weights = self.method.create(
            source,
            [f"{shard.name}.weight" for shard in shards],
            [(shard.out_size, in_size) for shard in shards],
        )
        self.bias = self._take_bias(source)

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        """x [T, in] -> float32 [T, out]."""
        return self.method.apply(self.weights, x, self.bias, out)

    def partial(self, x: Array) -> Array:
        """As a call, but the result may be float32 [parts, T, out], whose sum over the parts is still to be made: for
        a consumer that adds anyway (`ops.add_rms_norm` on a GPU)."""
        split = getattr(self.method, "apply_partial", None)
        return self(x) if split is None else split(self.weights, x, self.bias)

    def scores(self, x: Array) -> Array:
        """As a call without a bias, float32 also where the method's results are not: see LMHead."""
        exact = getattr(self.method, "logits", None)
        return self.method.apply(self.weights, x, None) if exact is None else exact(self.weights, x)

    def gated(self, x: Array, activation: Op) -> Array:
        """activation(gate, up) [T, out / 2] of a merged gate and up, in one pass where the method can."""
        fused = getattr(self.method, "apply_gated", None)
        return activation(self(x)) if fused is None else fused(self.weights, x, self.bias, activation)

    @property
    def input_quant(self) -> str | None:
        """Activation format that the op before this layer should emit; None: float32."""
        return self.method.input_quant

    @property
    def num_parameters(self) -> int:
        return self.out_size * self.in_size + sum(shard.out_size for shard in self.shards if shard.bias)

    @property
    def weight_bytes(self) -> int:
        """Bytes that one call reads of weights and bias."""
        return self.method.num_bytes(self.weights) + (0 if self.bias is None else int(self.bias.nbytes))

    def _take_bias(self, source: WeightSource) -> Array | None:
        """float32 [out]; shards without a bias get zeros where another has one."""
        if not any(shard.bias for shard in self.shards):
            return None
        parts = [
            source.take(f"{shard.name}.bias", (shard.out_size,)) if shard.bias else np.zeros(shard.out_size, np.float32)
            for shard in self.shards
        ]
        return source.place(np.concatenate(parts).astype(np.float32, copy=False))


class Linear(MergedLinear):
    """A linear layer of one checkpoint module."""

    def __init__(
        self,
        source: WeightSource,
        shard: Shard,
        in_size: int,
        scheme: QuantScheme,
        split: Split = Split.REPLICATED,
    ):
        super().__init__(source, [shard], in_size, scheme, split)
