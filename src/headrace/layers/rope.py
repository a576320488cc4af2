"""Rotary frequencies of every kind, and the tables of angles made from them.

Sources: Su et al. 2021 (default); kaiokendev 2023 (linear); "NTK-aware scaled RoPE", 2023 (dynamic); YaRN, Peng et al.
2023, section 3; Llama 3.1, Dubey et al. 2024, and its reference code (llama3); LongRoPE, Ding et al. 2024. Numbers
follow transformers.

Angles belong to a position alone, never to what else is in the batch:
- dynamic: transformers stretches the base by the length of the longest prompt of the batch. Here a position p below
  the trained maximum has the plain base, so prompts that fit are equal to transformers; from there on it has the base
  of a sequence of length p + 1, which is what transformers gives a token that is decoded.
- longrope: transformers changes from the short to the long factors when a sequence outgrows the trained length. Here
  the model's maximum decides once: long factors if it exceeds the trained length, else the short ones (as in vLLM).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from headrace import ops
from headrace.models.spec import RopeSpec
from headrace.ops.xp import Array

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_CHUNK = 1024  # positions computed at once


def inverse_frequencies(spec: RopeSpec, dim: int, max_position: int) -> np.ndarray:
    """Radians per position, float64 [dim / 2], of the `dim` rotary dimensions of a head.

    For kind dynamic: those of positions below the trained maximum. Raises ValueError for an unknown kind and for
    settings that contradict each other.
    """
    if spec.kind not in KINDS:
        raise ValueError(f"unknown RoPE kind {spec.kind!r}; there are: {', '.join(KINDS)}")
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary dimensions come in pairs, got {dim}")
    plain = _plain(spec.theta, dim)
    if spec.kind == "linear":
        result = plain / spec.factor
    elif spec.kind == "yarn":
        result = _yarn(spec, plain, max_position)
    elif spec.kind == "llama3":
        result = _llama3(spec, plain, max_position)
    elif spec.kind == "longrope":
        result = plain / _longrope_factors(spec, plain, max_position)
    else:
        result = plain
    return result / _divisors("divisors", spec.divisors, plain) if spec.divisors else result


def attention_factor(spec: RopeSpec, max_position: int) -> float:
    """What cos and sin are multiplied by: YaRN's and LongRoPE's temperature, 1 for the other kinds."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "yarn":
        if spec.mscale and spec.mscale_all_dim:
            return _yarn_scale(spec.factor, spec.mscale) / _yarn_scale(spec.factor, spec.mscale_all_dim)
        return _yarn_scale(spec.factor, 1.0)
    trained = spec.original_max_position or max_position
    factor = spec.factor if spec.factor != 1.0 else max_position / trained
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(trained))


def dynamic_base(theta: float, dim: int, factor: float, length: int, trained: int) -> float:
    """The base for a sequence of `length` tokens, of a model trained on `trained` ("dynamic NTK"); theta if it fits."""
    if length <= trained:
        return theta
    return theta * (factor * length / trained - (factor - 1.0)) ** (dim / (dim - 2))


class RotaryEmbedding:
    """Cosines and sines by position. Tables grow on demand; what a position gets never depends on that.

    As in transformers, frequencies are rounded to float32 and so is position x frequency: at long positions the
    rounding of the angle is larger than 1e-4, so an "exact" angle would be a different model.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, max_position: int):
        self.rotary_dim = head_dim if spec.rotary_dim is None else spec.rotary_dim
        if self.rotary_dim > head_dim:
            raise ValueError(f"{self.rotary_dim} rotary dimensions do not fit in a head of {head_dim}")
        self.spec = spec
        self.trained_max = spec.original_max_position or max_position
        self.inverse_frequencies = inverse_frequencies(spec, self.rotary_dim, max_position)
        self.attention_factor = attention_factor(spec, max_position)
        self._cos = np.empty((0, self.rotary_dim // 2), np.float32)
        self._sin = np.empty((0, self.rotary_dim // 2), np.float32)
        self._placed: tuple[Array, Array] | None = None

    def prepare(self, length: int, place: Callable[[np.ndarray], Array]) -> None:
        """Make the tables of positions below `length` and put them where the model computes; none may follow."""
        self._grow(length)
        self._placed = place(self._cos), place(self._sin)

    @property
    def tables(self) -> tuple[Array, Array]:
        """cos and sin, float32 [positions, rotary_dim / 2], where `prepare` has put them."""
        assert self._placed is not None
        return self._placed

    def at(self, positions: Array) -> tuple[Array, Array]:
        """cos and sin, float32 [T, rotary_dim / 2], of positions [T], attention factor included."""
        if self._placed is not None:
            cosines, sines = self._placed
            return ops.embedding(positions, cosines), ops.embedding(positions, sines)
        if len(positions) and (needed := int(positions.max()) + 1) > len(self._cos):
            self._grow(max(needed, 2 * len(self._cos)))
        return ops.embedding(positions, self._cos), ops.embedding(positions, self._sin)

    def _grow(self, length: int) -> None:
        # Always whole chunks of one shape: vectorised cosines may differ in the last bit between a vector and its rest.
        starts = range(len(self._cos), length, _CHUNK)
        angles = [self._angles(np.arange(start, start + _CHUNK)).astype(np.float64) for start in starts]
        scale = self.attention_factor
        self._cos = np.concatenate([self._cos, *((np.cos(a) * scale).astype(np.float32) for a in angles)])
        self._sin = np.concatenate([self._sin, *((np.sin(a) * scale).astype(np.float32) for a in angles)])

    def _angles(self, positions: np.ndarray) -> np.ndarray:
        """float32 [P, rotary_dim / 2]."""
        frequencies = np.broadcast_to(self.inverse_frequencies, (len(positions), self.rotary_dim // 2)).copy()
        if self.spec.kind == "dynamic":
            for row in np.flatnonzero(positions >= self.trained_max):
                base = dynamic_base(
                    self.spec.theta, self.rotary_dim, self.spec.factor, int(positions[row]) + 1, self.trained_max
                )
                frequencies[row] = _plain(base, self.rotary_dim)
        return positions.astype(np.float32)[:, None] * frequencies.astype(np.float32)


def _plain(theta: float, dim: int) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def _divisors(what: str, values: tuple[float, ...], plain: np.ndarray) -> np.ndarray:
    if len(values) != len(plain):
        raise ValueError(f"RoPE {what}: {len(values)} given, {len(plain)} expected")
    return np.array(values, np.float64)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(spec: RopeSpec, plain: np.ndarray, max_position: int) -> np.ndarray:
    """Dimensions that turn often keep their frequency, slow ones are divided by `factor`, a ramp lies between."""
    dim = 2 * len(plain)
    trained = spec.original_max_position or max_position

    def dimension(turns: float) -> float:  # the dimension that makes `turns` turns over the trained length
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
    return plain / spec.factor * ramp + plain * (1.0 - ramp)


def _llama3(spec: RopeSpec, plain: np.ndarray, max_position: int) -> np.ndarray:
    """Short wavelengths stay, long ones are divided by `factor`, those between are interpolated."""
    turns = (spec.original_max_position or max_position) * plain / (2 * math.pi)  # over the trained length
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return plain * (smooth + (1.0 - smooth) / spec.factor)


def _longrope_factors(spec: RopeSpec, plain: np.ndarray, max_position: int) -> np.ndarray:
    trained = spec.original_max_position or max_position
    if max_position > trained:
        return _divisors("long_factor", spec.long_factor, plain)
    return _divisors("short_factor", spec.short_factor, plain)
