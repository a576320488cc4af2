"""DeviceWorker: the model, cache, table and runner of one GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from headrace.attention.select import select_backend
from headrace.attention.triton import TritonAttention
from headrace.config import ConfigError, EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.core.plan import StepPlan
from headrace.env import mark_steps
from headrace.layers.weights import Checkpoint, WeightSource
from headrace.models.registry import build_model
from headrace.models.spec import ModelSpec
from headrace.ops.triton.ahead import Ahead
from headrace.quant.cuda import bind_cuda
from headrace.sampling.grammar import GrammarCompiler
from headrace.worker.device_cache import DeviceKVCache
from headrace.worker.device_drafting import make_device_proposer
from headrace.worker.device_memory import StepTooLarge, run_in_parts, without_drafts
from headrace.worker.device_runner import DeviceRunner, FinishedStep, PendingStep
from headrace.worker.device_speculation import Speculation
from headrace.worker.device_table import DeviceTable, Hosts
from headrace.worker.drafting import DraftSource, make_sampler
from headrace.worker.step_kernel import StepKernelChoice
from headrace.worker.transfer import WeightTransfer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@contextmanager
def _memory_errors_explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU's memory ran out while the model was set up ({str(error).splitlines()[0]}); lower gpu_memory, "
            "kv_cache or max_num_batched_tokens, or end what else runs on the GPU"
        ) from None


class DeviceWorker:
    """One model on one GPU."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        config: EngineConfig,
        layout: KVLayout,
        attention_backend: str | None = None,
        grammars: GrammarCompiler | None = None,
        device: torch.device | None = None,
        draft: DraftSource | None = None,
        ahead: Ahead | None = None,
    ):
        """Without `grammars` no request may have one. `draft`: the model that drafts, if the configuration has one.
        `ahead` compiles what will be needed; this worker stops it. Raises ValueError where the model needs what GPUs
        lack here."""
        self._ahead = ahead
        device = device or torch.device("cuda", torch.cuda.current_device())
        dtype = DTYPES[config.dtype]
        scheme = bind_cuda(device, dtype, config.invariant)

        def place(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.array(array)).to(device)

        # compiled, if need be, while the weights are read
        self.step_kernel = StepKernelChoice(spec, config, layout, device)
        with torch.inference_mode(), _memory_errors_explained():
            with WeightTransfer(device) as transfer:
                self.model = build_model(spec, WeightSource(checkpoint, place, transfer), scheme)
            moved = transfer.report
            self.weights_report = f"brought over: {moved}" if moved.num_bytes else "made up on the GPU"
            self.model.prepare(config.max_model_len, place)
            backend, self.attention_refusals = select_backend(
                "cuda", config.dtype, self.model.attention_layers, layout.block_size, attention_backend
            )
            assert isinstance(backend, TritonAttention)
            self.attention_backend = backend.name
            most = (config.draft_tree or config.max_draft_tokens) if config.proposers else 0
            most_queries = 1 + most if most else 0
            backend.reserve(
                layout.groups, spec.num_heads, config.max_num_seqs, device, config.max_model_len, most_queries
            )
            table = DeviceTable(
                config.max_num_seqs, config.max_model_len, len(layout.groups), layout.block_size, device,
                Hosts.WARM if config.verify == "residual" else Hosts.ODD,
            )  # fmt: skip
            self._drafts, self._marks = bool(config.proposers), mark_steps()
            self.proposer = make_device_proposer(
                config, self.model, scheme, draft, dtype, device, place, grammars
            )
            cache, speculation = DeviceKVCache(layout, dtype, device), None
            if config.proposers:
                speculation = Speculation(table, self.proposer, config.max_draft_tokens, config.draft_tree)
            self._runner = DeviceRunner(
                self.model,
                cache,
                table,
                backend,
                make_sampler(config, grammars),
                config.max_num_batched_tokens,
                graphs=config.graphs,
                speculation=speculation,
                most_drafts=most,
                trees=config.draft_tree > 0,
                acceptance=config.synthetic_acceptance,
                step_kernel=self.step_kernel.kernel(self.model, cache),
            )

    @property
    def runner(self) -> DeviceRunner:
        """What runs its steps."""
        return self._runner

    def execute(self, plan: StepPlan) -> PendingStep | FinishedStep:
        """Send one step to the GPU; where its memory runs out, run the step in parts."""
        if self._ahead is not None:
            self._ahead.hold()
        if not self._marks:
            return self._execute(plan)
        torch.cuda.nvtx.range_push(f"step {plan.step_id}: {plan.num_spans} rows, {plan.num_tokens} tokens")
        try:
            return self._execute(plan)
        finally:
            torch.cuda.nvtx.range_pop()

    def _execute(self, plan: StepPlan) -> PendingStep | FinishedStep:
        try:
            return self._runner.execute(plan)
        except StepTooLarge as error:  # beyond this block, what the exception held of the step is free
            done, num_done = error.done, error.num_done
        print("headrace: the GPU's memory ran out; the step runs again in parts", file=sys.stderr)
        self._runner.settle()
        if self._drafts:
            plan = without_drafts(plan)
        return FinishedStep(run_in_parts(self._runner.execute, plan, done, num_done))

    @property
    def num_graphs(self) -> int:
        """Captured so far, but for those of networks that draft."""
        return self._runner.launcher.counts.captures

    def report(self) -> list[str]:
        """Lines for a person: how the graphs did, and what was compiled ahead."""
        lines = self._runner.launcher.counts.lines()
        if self._ahead is not None:
            lines += self._ahead.counts.lines()
        return lines

    def idle(self) -> bool:
        """See InProcessExecutor."""
        if self._ahead is not None:
            self._ahead.go_on()
        return self.proposer.idle() or self._runner.idle()

    def stop(self) -> None:
        """Let go of the model, the cache and the graphs."""
        if self._ahead is not None:
            self._ahead.stop()
        self.step_kernel.stop()
        self._runner.close()
        self.proposer.close()
        del self._runner, self.model, self.proposer
        gc.collect()  # graphs and the runner know each other
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
