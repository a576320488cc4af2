"""Registers the native kernels as variants of the ops. What they cannot take goes to the reference: arrays that are not
float32 numpy arrays with contiguous last axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace import ops
from headrace.ops.native.library import address, library
from headrace.ops.native.packed import GATES
from headrace.ops.native.recording import current, empty, keep, unrecordable
from headrace.ops.registry import Op, bind

_SCALE, _SOFT_CAP, _ADD = range(3)


def bind_native() -> dict[str, str]:
    """Bind every op that has a native variant to it; returns what each op is bound to."""
    return bind(("native",))


def bind_references() -> dict[str, str]:
    """Bind every op to its reference."""
    return bind(())


def _plain(*arrays: Any) -> bool:
    """Every array is float32 of numpy with a contiguous last axis."""
    return all(
        isinstance(array, np.ndarray) and array.dtype == np.float32 and array.ndim and array.strides[-1] == 4
        for array in arrays
    )


def _reference(op: Op) -> Callable[..., Any]:
    """For arguments that the kernel does not take."""
    unrecordable()
    return op.reference


@ops.embedding.variant("native")
def _embedding(token_ids: np.ndarray, weight: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    if not _plain(weight) or weight.ndim != 2 or token_ids.dtype != np.int32 or token_ids.ndim != 1 or out is not None:
        return _reference(ops.embedding)(token_ids, weight, out=out)
    if token_ids.strides[0] != 4:
        return _reference(ops.embedding)(token_ids, weight, out=out)
    tokens, size = len(token_ids), weight.shape[1]
    out = empty((tokens, size))
    keep((token_ids, weight))
    if (recording := current()) is not None:
        recording.position_limit = min(recording.position_limit, weight.shape[0])
    library().gather_rows(address(weight), weight.strides[0] >> 2, address(token_ids), tokens, address(out), size)
    return out


@ops.rms_norm.variant("native")
def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray | None = None) -> np.ndarray:
    if not _plain(x, weight) or x.ndim > 3 or x.ndim < 2 or (out is not None and not _plain(out)):
        return _reference(ops.rms_norm)(x, weight, eps, out=out)
    if out is None:
        out = empty(x.shape)
    apart = x.ndim == 3
    library().rms_norm(
        address(x),
        x.strides[0] >> 2,
        x.strides[1] >> 2 if apart else 0,
        x.shape[0],
        x.shape[1] if apart else 1,
        address(weight),
        address(out),
        out.strides[0] >> 2,
        out.strides[1] >> 2 if apart else 0,
        x.shape[-1],
        eps,
    )
    return out


@ops.add_rms_norm.variant("native")
def _add_rms_norm(
    x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    if not _plain(x, residual, weight) or x.ndim != 2 or (out is not None and not _plain(out)):
        return _reference(ops.add_rms_norm)(x, residual, weight, eps, out=out)
    if out is None:
        out = empty(x.shape)
    library().add_rms_norm(
        address(x),
        x.strides[0] >> 2,
        address(residual),
        residual.strides[0] >> 2,
        x.shape[0],
        address(weight),
        address(out),
        out.strides[0] >> 2,
        x.shape[1],
        eps,
    )
    return out, residual


@ops.rope.variant("native")
def _rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    if not _plain(x, cos, sin) or cos.strides != sin.strides or (out is not None and not _plain(out)):
        return _reference(ops.rope)(x, cos, sin, out=out)
    if out is None:
        out = empty(x.shape)
    library().rope(
        address(x),
        x.strides[0] >> 2,
        x.strides[1] >> 2,
        x.shape[0],
        x.shape[1],
        address(cos),
        address(sin),
        cos.strides[0] >> 2,
        address(out),
        out.strides[0] >> 2,
        out.strides[1] >> 2,
        cos.shape[1],
        x.shape[2],
    )
    return out


def _gated(op: Op, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if not _plain(x) or x.ndim != 2 or (out is not None and not _plain(out)):
        return _reference(op)(x, out=out)
    tokens, half = x.shape[0], x.shape[1] // 2
    if out is None:
        out = empty((tokens, half))
    kind = GATES.index(op.name)
    library().gated(kind, address(x), x.strides[0] >> 2, address(out), out.strides[0] >> 2, tokens, half)
    return out


@ops.silu_mul.variant("native")
def _silu_mul(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return _gated(ops.silu_mul, x, out)


@ops.gelu_tanh_mul.variant("native")
def _gelu_tanh_mul(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return _gated(ops.gelu_tanh_mul, x, out)


@ops.gelu_mul.variant("native")
def _gelu_mul(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return _gated(ops.gelu_mul, x, out)


@ops.swiglu_clamped_mul.variant("native")
def _swiglu_clamped_mul(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return _gated(ops.swiglu_clamped_mul, x, out)


def _elementwise(kind: int, x: np.ndarray, y: np.ndarray | None, value: float, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        out = empty(x.shape)
    library().elementwise(
        kind,
        address(x),
        x.strides[0] >> 2,
        None if y is None else address(y),
        0 if y is None else y.strides[0] >> 2,
        float(value),
        address(out),
        out.strides[0] >> 2,
        x.shape[0],
        x.shape[1],
    )
    return out


def _rows(out: np.ndarray | None, *arrays: Any) -> bool:
    """Plain matrices of one shape, `out` too if it is given."""
    given = arrays if out is None else (*arrays, out)
    return _plain(*given) and all(array.ndim == 2 and array.shape == given[0].shape for array in given)


@ops.scale.variant("native")
def _scale(x: np.ndarray, factor: float, out: np.ndarray | None = None) -> np.ndarray:
    if not _rows(out, x):
        return _reference(ops.scale)(x, factor, out=out)
    return _elementwise(_SCALE, x, None, factor, out)


@ops.copied.variant("native")
def _copied(x: np.ndarray) -> np.ndarray:
    if not _rows(None, x):
        return _reference(ops.copied)(x)
    return _elementwise(_SCALE, x, None, 1.0, None)


@ops.joined.variant("native")
def _joined(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if not _rows(None, x) or not _rows(None, y) or len(x) != len(y):
        return _reference(ops.joined)(x, y)
    out = empty((x.shape[0], x.shape[1] + y.shape[1]))
    _elementwise(_SCALE, x, None, 1.0, out[:, : x.shape[1]])
    _elementwise(_SCALE, y, None, 1.0, out[:, x.shape[1] :])
    return out


@ops.soft_cap.variant("native")
def _soft_cap(x: np.ndarray, cap: float, out: np.ndarray | None = None) -> np.ndarray:
    if not _rows(out, x):
        return _reference(ops.soft_cap)(x, cap, out=out)
    return _elementwise(_SOFT_CAP, x, None, cap, out)


@ops.add.variant("native")
def _add(x: np.ndarray, y: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    if not _rows(out, x, y):
        return _reference(ops.add)(x, y, out=out)
    return _elementwise(_ADD, x, y, 0.0, out)


@ops.gumbel_noise.variant("native")
def _gumbel_noise(token_ids: np.ndarray, positions: np.ndarray, seeds: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """The very bits of the reference: uniform numbers are exact, and the logarithms are numpy's in both."""
    counters = (positions, seeds, choices)
    if (
        not all(isinstance(each, np.ndarray) for each in (token_ids, *counters))
        or token_ids.ndim != 1
        or not len(token_ids)
    ):
        return _reference(ops.gumbel_noise)(token_ids, positions, seeds, choices)
    unrecordable()  # this is no part of a forward pass
    positions, seeds, choices = (np.ascontiguousarray(each, np.int64) for each in counters)
    first, count = int(token_ids[0]), len(token_ids)
    blocks = ((first + count - 1) >> 2) - (first >> 2) + 1
    numbers = np.empty((len(positions), 4 * blocks), np.float32)
    library().uniforms(
        first >> 2, blocks, address(positions), address(seeds), address(choices), len(positions), address(numbers)
    )
    uniform = numbers[:, first & 3 : (first & 3) + count]
    return -np.log(-np.log(uniform))
