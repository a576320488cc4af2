"""The worker of the device that the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.layers.weights import Checkpoint
from headrace.models.spec import ModelSpec
from headrace.sampling.grammar import GrammarCompiler
from headrace.worker.drafting import DraftSource
from headrace.worker.worker import Worker

if TYPE_CHECKING:
    from headrace.worker.device_worker import DeviceWorker


def make_worker(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    config: EngineConfig,
    layout: KVLayout,
    attention_backend: str | None,
    grammars: GrammarCompiler,
    draft: DraftSource | None = None,
) -> Worker | DeviceWorker:
    """See Worker; what needs torch is imported only for a GPU."""
    if config.device == "cpu":
        return Worker(spec, checkpoint, config, layout, attention_backend, grammars, draft)
    from headrace.worker.device_worker import DeviceWorker
    from headrace.worker.rehearsal import compile_ahead

    ahead = compile_ahead(spec, checkpoint, config, layout, attention_backend, draft)
    try:
        return DeviceWorker(spec, checkpoint, config, layout, attention_backend, grammars, draft=draft, ahead=ahead)
    except BaseException:
        if ahead is not None:
            ahead.stop()
        raise
