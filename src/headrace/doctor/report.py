"""The whole report: sections in order, measured ones only where asked for."""

from __future__ import annotations

from collections.abc import Callable

from headrace.doctor.attention import attention
from headrace.doctor.gpu import gpu
from headrace.doctor.processor import kernels, processor
from headrace.doctor.rates import decode, rates
from headrace.doctor.section import Section

DEVICES: list[Callable[[bool], Section]] = [gpu]  # a kind of device adds its section here


def sections(measure: bool = True, model: str | None = None) -> list[Section]:
    """Every section; without `measure` nothing takes more than a blink."""
    found = [processor(), kernels(), attention()]
    if measure:
        found += [rates(), decode(model)]
    return found + [device(measure) for device in DEVICES]
