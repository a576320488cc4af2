"""The mixture-of-experts block: a router and its experts' weights, from whichever layout the checkpoint holds them in.

Experts are float32 whatever the scheme of the linear layers; the router is one of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from headrace import ops
from headrace.layers.linear import Linear, Shard
from headrace.layers.mlp import activation
from headrace.layers.weights import WeightSource
from headrace.models.spec import ModelSpec
from headrace.ops.xp import Array
from headrace.quant.base import QuantScheme


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the router and the three matrices of an expert."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class ExpertLayout(Enum):
    """How a checkpoint's merged `gate_up_proj` and `down_proj` lie."""

    OUT_IN = "out_in"  # [E, 2I, H] gate above up, and [E, H, I]
    IN_OUT = "in_out"  # [E, H, 2I] gate and up in turns, and [E, I, H] (GPT-OSS)


class MixtureOfExperts:
    """Each token through its best experts, weighted by the router.

    The experts are read as merged tensors (`experts.gate_up_proj`, `experts.down_proj`, and their `_bias`), else as
    stacked ones (`experts.gate_proj.weight` [E, I, H] and so on: GGUF), else one by one under `names`
    (`experts.0.w1.weight`), as most are published.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        prefix: str,
        scheme: QuantScheme,
        names: ExpertNames,
        layout: ExpertLayout,
    ):
        if spec.moe is None:
            raise ValueError(f"a {spec.family} model has experts: its spec must say how many")
        activation(spec.activation)
        moe = spec.moe
        self.routing = ops.Routing(moe.experts_per_token, moe.normalise)
        shard = Shard(f"{prefix}.{names.router}", moe.num_experts, moe.router_bias)
        self.router = Linear(source, shard, spec.hidden_size, scheme)
        reader = _Reader(source, f"{prefix}.experts", moe.num_experts, moe.intermediate_size, spec.hidden_size)
        if layout is ExpertLayout.IN_OUT and reader.has("gate_up_proj"):
            weights = reader.in_out(moe.expert_bias)
        elif reader.has("gate_up_proj"):
            weights = reader.merged()
        elif reader.has(f"{ExpertNames.gate}.weight"):
            weights = reader.stacked(moe.expert_bias)
        else:
            weights = reader.single(names)
        gate_up, down, gate_up_bias, down_bias = weights
        self.experts = ops.Experts(gate_up, down, spec.activation, gate_up_bias, down_bias)

    def __call__(self, x: Array) -> Array:
        """x [T, H] -> [T, H]."""
        return ops.moe(x, self.router(x), self.experts, self.routing)

    @property
    def num_parameters(self) -> int:
        return self.router.num_parameters + sum(int(array.size) for array in self._arrays)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the router and of all experts."""
        return self.router.weight_bytes + sum(int(array.nbytes) for array in self._arrays)

    @property
    def _arrays(self) -> list[Array]:
        experts = self.experts
        found = (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
        return [array for array in found if array is not None]


_Weights = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]  # gate_up, down and their biases


@dataclass(frozen=True)
class _Reader:
    """Takes one block's experts: E experts, I inner and H outer dimensions."""

    source: WeightSource
    prefix: str
    num: int
    inner: int
    hidden: int

    def has(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.source

    def take(self, name: str, *shape: int) -> np.ndarray:
        return np.ascontiguousarray(self.source.take(f"{self.prefix}.{name}", shape), np.float32)

    def merged(self) -> _Weights:
        gate_up = self.take("gate_up_proj", self.num, 2 * self.inner, self.hidden)
        return gate_up, self.take("down_proj", self.num, self.hidden, self.inner), None, None

    def in_out(self, bias: bool) -> _Weights:
        gate_up = _deinterleave(self.take("gate_up_proj", self.num, self.hidden, 2 * self.inner).swapaxes(1, 2))
        down = np.ascontiguousarray(self.take("down_proj", self.num, self.inner, self.hidden).swapaxes(1, 2))
        if not bias:
            return gate_up, down, None, None
        gate_up_bias = _deinterleave(self.take("gate_up_proj_bias", self.num, 2 * self.inner))
        return gate_up, down, gate_up_bias, self.take("down_proj_bias", self.num, self.hidden)

    def stacked(self, bias: bool) -> _Weights:
        gate_up = np.empty((self.num, 2 * self.inner, self.hidden), np.float32)
        gate_up[:, : self.inner] = self.take("gate_proj.weight", self.num, self.inner, self.hidden)
        gate_up[:, self.inner :] = self.take("up_proj.weight", self.num, self.inner, self.hidden)
        down = self.take("down_proj.weight", self.num, self.hidden, self.inner)
        if not bias:
            return gate_up, down, None, None
        biases = [self.take(f"{name}.bias", self.num, self.inner) for name in ("gate_proj", "up_proj")]
        return gate_up, down, np.concatenate(biases, axis=1), self.take("down_proj.bias", self.num, self.hidden)

    def single(self, names: ExpertNames) -> _Weights:
        gate_up = np.empty((self.num, 2 * self.inner, self.hidden), np.float32)
        down = np.empty((self.num, self.hidden, self.inner), np.float32)
        for expert in range(self.num):
            gate_up[expert, : self.inner] = self.take(f"{expert}.{names.gate}.weight", self.inner, self.hidden)
            gate_up[expert, self.inner :] = self.take(f"{expert}.{names.up}.weight", self.inner, self.hidden)
            down[expert] = self.take(f"{expert}.{names.down}.weight", self.hidden, self.inner)
        return gate_up, down, None, None


def _deinterleave(values: np.ndarray) -> np.ndarray:
    """Gate and up in turns along axis 1 -> all of gate, then all of up; C-contiguous, as `ops.linear` needs it."""
    return np.ascontiguousarray(np.concatenate([values[:, ::2], values[:, 1::2]], axis=1))
