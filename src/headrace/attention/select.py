"""Choosing the attention backend: the first one that can serve every layer, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.attention.base import AttentionBackend, LayerAttention
from headrace.attention.native import NativeAttention
from headrace.attention.reference import ReferenceAttention

# name -> class with `caps` and a constructor that takes block_size; best first. A GPU backend adds a line. A class may
# have `unavailable() -> str | None`: why it cannot be used in this process at all.
BACKENDS: dict[str, Any] = {
    "native": NativeAttention,
    "reference": ReferenceAttention,
}


def backends_of(device: str) -> dict[str, Any]:
    """Those there are, best first; what needs torch only where it is used."""
    if device != "cuda":
        return BACKENDS
    from headrace.attention.flashinfer import FlashInferAttention
    from headrace.attention.triton import TritonAttention

    return {"triton": TritonAttention, "flashinfer": FlashInferAttention, **BACKENDS}


def select_backend(
    device: str,
    kv_format: str,
    layers: Sequence[LayerAttention],
    block_size: int,
    override: str | None = None,
) -> tuple[AttentionBackend, list[tuple[str, list[str]]]]:
    """(backend, refusals): the first of BACKENDS, or the one named by `override`, that can serve all `layers`.

    `refusals` has (name, reasons) of every backend passed over. Raises ValueError, reasons listed, if none is left.
    """
    backends = backends_of(device)
    if override is not None and override not in backends:
        raise ValueError(f"unknown attention backend {override!r}; there are: {', '.join(backends)}")
    refusals: list[tuple[str, list[str]]] = []
    for name in backends if override is None else [override]:
        create: Callable[[int], AttentionBackend] = backends[name]
        caps = backends[name].caps
        missing = getattr(backends[name], "unavailable", lambda: None)()
        every = [missing] if missing else []
        every += [reason for layer in layers for reason in caps.refusals(device, kv_format, layer, block_size)]
        reasons = list(dict.fromkeys(every))  # layers repeat each other
        if not reasons:
            backend = create(block_size)
            backend.kv_format = kv_format
            return backend, refusals
        refusals.append((name, reasons))
    listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refusals)
    raise ValueError(f"no attention backend can serve this model ({listed})")
