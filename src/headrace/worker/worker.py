"""Worker: a process's share of the engine. Loads the model, owns cache, table and runner."""

from __future__ import annotations

from headrace.attention.select import select_backend
from headrace.config import EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.core.plan import StepPlan, StepResult
from headrace.layers.weights import Checkpoint, WeightSource
from headrace.models.registry import build_model
from headrace.models.spec import ModelSpec
from headrace.quant.cpu import bind_cpu
from headrace.sampling.grammar import GrammarCompiler
from headrace.worker.drafting import DraftSource, make_proposer, make_sampler
from headrace.worker.kv_cache import KVCache
from headrace.worker.runner import ModelRunner
from headrace.worker.table import RequestTable


class Worker:
    """One model on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        config: EngineConfig,
        layout: KVLayout,
        attention_backend: str | None = None,
        grammars: GrammarCompiler | None = None,
        draft: DraftSource | None = None,
    ):
        """Without `grammars` no request may have one. `draft`: the model that drafts, if the configuration has one."""
        scheme = bind_cpu(config.num_threads, config.mode, config.quantize, config.quantize_group)
        self.model = build_model(spec, WeightSource(checkpoint), scheme)
        backend, self.attention_refusals = select_backend(
            "cpu", layout.kv_format, self.model.attention_layers, layout.block_size, attention_backend
        )
        self.attention_backend = backend.name
        if config.draft_tree and not backend.caps.trees:
            raise ValueError(f"attention backend {backend.name} knows no token trees; leave out draft_tree")
        self.proposer = make_proposer(config, self.model, scheme, grammars, draft)
        self._runner = ModelRunner(
            self.model,
            KVCache(layout, backend.caps.whole_blocks),
            RequestTable(config.max_num_seqs, config.max_model_len, len(layout.groups), layout.block_size),
            backend,
            make_sampler(config, grammars),
            self.proposer,
            config.draft_tree,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self._runner.execute(plan)

    def stop(self) -> None:
        """Let go of the model and the cache."""
        del self._runner, self.model, self.proposer
