"""Operations: one signature and one reference each, and the implementation bound when the process starts.

A reference is plain array code that runs on numpy and on torch. A variant (native, triton, cuda ...) registers
itself for the same op; `bind` chooses once, before the first step, so a call costs one indirection. Tests bind the
reference back with `using()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

_OPS: dict[str, Op] = {}


class Op:
    """A callable that forwards to its bound implementation; `reference` is its definition and its slow twin."""

    def __init__(self, reference: Callable[..., Any]):
        update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self.variants: dict[str, Callable[..., Any]] = {"reference": reference}
        self.bound = "reference"
        self.impl = reference
        if self.name in _OPS:
            raise ValueError(f"op {self.name!r} is defined twice")
        _OPS[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.impl(*args, **kwargs)

    def variant(self, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: register an implementation of this op under `kind`."""

        def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
            self.variants[kind] = implementation
            return implementation

        return register

    def bind(self, kind: str) -> None:
        self.impl, self.bound = self.variants[kind], kind


def op(reference: Callable[..., Any]) -> Op:
    """Decorator: make a reference function the op of its name."""
    return Op(reference)


def all_ops() -> tuple[Op, ...]:
    """Every op there is."""
    return tuple(_OPS.values())


def bind(preference: Sequence[str]) -> dict[str, str]:
    """Bind every op to the first kind of `preference` that it has, else to its reference; returns {op: kind}."""
    for each in _OPS.values():
        each.bind(next((kind for kind in preference if kind in each.variants), "reference"))
    return bound()


def bound() -> dict[str, str]:
    """What each op is bound to now."""
    return {name: each.bound for name, each in sorted(_OPS.items())}


@contextmanager
def using(*preference: str) -> Iterator[None]:
    """Bind every op by `preference` inside the block (nothing named: the references), then restore."""
    before = bound()
    bind(preference)
    try:
        yield
    finally:
        for name, kind in before.items():
            _OPS[name].bind(kind)
