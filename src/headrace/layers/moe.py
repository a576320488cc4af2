"""The mixture-of-experts block: a router and its experts' weights, from whichever layout the checkpoint holds them in.

Experts are stored as the scheme of the linear layers says, if it is an ExpertScheme, else in float32; the router is one
of the linear layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class ExpertScheme(Protocol):
    """A scheme that stores an expert's matrices in a form of its own."""

    def expert(self, parts: Any, in_size: int) -> Any:
        """A matrix [sum of N, in_size] of stored parts, one below the other."""
        ...

    def product(self, x: Array, weight: Any, bias: Array | None = None) -> Array:
        """x [T, in_size] times such a matrix transposed, plus bias."""
        ...


@runtime_checkable
class ExpertDevice(Protocol):
    """A scheme whose experts are tensors on a device."""

    def experts(self, weights: np.ndarray) -> Array:
        """float32 [E, N, K] as they are multiplied."""
        ...

    def experts_memory(self, shape: tuple[int, int, int]) -> Array:
        """Memory for [E, N, K] as they are multiplied, to be filled by a WeightSource."""
        ...


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
        kept = scheme if isinstance(scheme, ExpertScheme) else None
        try:
            if isinstance(scheme, ExpertDevice) and not reader.is_in_out(layout):
                gate_ups, downs, gate_up_bias, down_bias = reader.placed(names, moe.expert_bias, scheme)
            elif kept is not None and not reader.has("gate_up_proj"):
                gate_ups, downs, gate_up_bias, down_bias = reader.packed(names, moe.expert_bias, kept)
            else:
                gate_ups, downs, gate_up_bias, down_bias = reader.floats(names, layout, moe.expert_bias)
                if kept is not None:
                    gate_ups, downs = reader.repacked(gate_ups, kept), reader.repacked(downs, kept)
                elif isinstance(scheme, ExpertDevice):
                    gate_ups, downs = scheme.experts(gate_ups), scheme.experts(downs)
        except ValueError as error:
            raise ValueError(f"{prefix}.experts: {error}") from None
        gate_up_bias, down_bias = (None if each is None else source.place(each) for each in (gate_up_bias, down_bias))
        product = ops.linear if kept is None else kept.product
        self.experts = ops.Experts(gate_ups, downs, spec.activation, gate_up_bias, down_bias, product)

    def __call__(self, x: Array) -> Array:
        """x [T, H] -> [T, H]."""
        return ops.moe(x, self.router(x), self.experts, self.routing)

    @property
    def num_parameters(self) -> int:
        return self.router.num_parameters + sum(_count(array) for array in self._arrays)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the router and of all experts."""
        return self.router.weight_bytes + sum(int(array.nbytes) for array in self._arrays)

    @property
    def _arrays(self) -> list[Any]:
        """Arrays, or one matrix an expert."""
        found: list[Any] = []
        for each in (self.experts.gate_up, self.experts.down, self.experts.gate_up_bias, self.experts.down_bias):
            found += each if isinstance(each, list) else [] if each is None else [each]
        return found


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

    def floats(self, names: ExpertNames, layout: ExpertLayout, bias: bool) -> _Weights:
        """In float32, from whichever tensors there are."""
        if self.is_in_out(layout):
            return self.in_out(bias)
        if self.has("gate_up_proj"):
            return self.merged()
        return self.stacked(bias) if self.has(f"{ExpertNames.gate}.weight") else self.single(names)

    def is_in_out(self, layout: ExpertLayout) -> bool:
        """Whether the tensors lie with their inputs first, gate and up in turns."""
        return layout is ExpertLayout.IN_OUT and self.has("gate_up_proj")

    def placed(self, names: ExpertNames, bias: bool, device: ExpertDevice) -> tuple[Any, ...]:
        """As `floats`, written straight into a device's memory; not of tensors with their inputs first."""
        gate_up = device.experts_memory((self.num, 2 * self.inner, self.hidden))
        down = device.experts_memory((self.num, self.hidden, self.inner))
        gates, ups = gate_up[:, : self.inner], gate_up[:, self.inner :]
        if self.has("gate_up_proj"):
            self.source.fill(f"{self.prefix}.gate_up_proj", gate_up)
            self.source.fill(f"{self.prefix}.down_proj", down)
            return gate_up, down, None, None
        if self.has(f"{ExpertNames.gate}.weight"):
            for name, target in ((ExpertNames.gate, gates), (ExpertNames.up, ups), (ExpertNames.down, down)):
                self.source.fill(f"{self.prefix}.{name}.weight", target)
            return gate_up, down, *(self.stacked_biases() if bias else (None, None))
        for expert in range(self.num):
            for name, target in ((names.gate, gates), (names.up, ups), (names.down, down)):
                self.source.fill(f"{self.prefix}.{expert}.{name}.weight", target[expert])
        return gate_up, down, None, None

    def packed(self, names: ExpertNames, bias: bool, scheme: ExpertScheme) -> tuple[Any, ...]:
        """Lists of E matrices gate | up and down, as `scheme` stores them, and their biases."""
        stacked = self.has(f"{ExpertNames.gate}.weight")

        def parts(which: str, name: str, rows: int, columns: int) -> Any:
            if stacked:
                return self.source.take_stacked(f"{self.prefix}.{which}.weight", (self.num, rows, columns))
            single = [f"{self.prefix}.{expert}.{name}.weight" for expert in range(self.num)]
            return [self.source.take_stored(each, (rows, columns)) for each in single]

        gates = parts(ExpertNames.gate, names.gate, self.inner, self.hidden)
        ups = parts(ExpertNames.up, names.up, self.inner, self.hidden)
        downs = parts(ExpertNames.down, names.down, self.hidden, self.inner)
        return (
            [scheme.expert(both, self.hidden) for both in zip(gates, ups, strict=True)],
            [scheme.expert([down], self.inner) for down in downs],
            *(self.stacked_biases() if stacked and bias else (None, None)),
        )

    @staticmethod
    def repacked(weights: np.ndarray, scheme: ExpertScheme) -> list[Any]:
        """float32 [E, N, K] as `scheme` stores them."""
        from headrace.ops.native.packed import stored_float32

        return [scheme.expert([stored_float32(each)], each.shape[1]) for each in weights]

    def stacked_biases(self) -> tuple[np.ndarray, np.ndarray]:
        gate_up = [self.take(f"{name}.bias", self.num, self.inner) for name in ("gate_proj", "up_proj")]
        return np.concatenate(gate_up, axis=1), self.take("down_proj.bias", self.num, self.hidden)

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
        return gate_up, down, *self.stacked_biases()

    def single(self, names: ExpertNames) -> _Weights:
        gate_up = np.empty((self.num, 2 * self.inner, self.hidden), np.float32)
        down = np.empty((self.num, self.hidden, self.inner), np.float32)
        for expert in range(self.num):
            gate_up[expert, : self.inner] = self.take(f"{expert}.{names.gate}.weight", self.inner, self.hidden)
            gate_up[expert, self.inner :] = self.take(f"{expert}.{names.up}.weight", self.inner, self.hidden)
            down[expert] = self.take(f"{expert}.{names.down}.weight", self.hidden, self.inner)
        return gate_up, down, None, None


def _count(weights: Any) -> int:
    """Elements of an array of any library, or of a matrix of a scheme."""
    return math.prod(weights.shape) if hasattr(weights, "shape") else int(weights.size)


def _deinterleave(values: np.ndarray) -> np.ndarray:
    """Gate and up in turns along axis 1 -> all of gate, then all of up; C-contiguous, as `ops.linear` needs it."""
    return np.ascontiguousarray(np.concatenate([values[:, ::2], values[:, 1::2]], axis=1))
