"""Engine: everything between a prompt and its updates, in one process and one thread.

`LLM`, the command line and the benchmarks are thin layers over it.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.autopilot.depth import AutoDepth, PassCost
from headrace.autopilot.host_bound import HostBound
from headrace.autopilot.overlap import RunAhead
from headrace.autopilot.slo import SloPacing
from headrace.config import ConfigError, EngineArgs
from headrace.core.drafting import DraftPolicy, FixedDepth, NoDrafts
from headrace.core.kv_manager import KVCacheManager
from headrace.core.loop import EngineCore, NullObserver, StepObserver
from headrace.core.pacing import NoPacing, Pacing
from headrace.core.plan_builder import SchedulerLimits
from headrace.core.request import FinishReason, RequestError, TokenOutput
from headrace.core.scheduler import Scheduler
from headrace.core.visits import OneRun, Visits
from headrace.device.cpu import cpu_facts
from headrace.device.cuda import GpuFacts
from headrace.executor.inproc import InProcessExecutor
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.defaults import recommended_params
from headrace.frontend.draft import check_same_tokens, draft_source, kind_of, open_draft
from headrace.frontend.input import InputProcessor, Prompt
from headrace.frontend.output import ChoiceStream, CompletionOutput, RequestOutput, Update
from headrace.frontend.tokenizer import Tokenizer
from headrace.ledger.bill import Bill, merge
from headrace.ledger.book import Ledger, NullLedger
from headrace.ledger.cost import CostModel
from headrace.ledger.gpu import gpu_machine_facts
from headrace.ledger.machine import machine_facts
from headrace.ledger.observer import LedgerObserver
from headrace.ledger.work import WorkModel
from headrace.loading.checkpoint import LoadedCheckpoint, open_checkpoint
from headrace.loading.store import resolve_model
from headrace.resolve import Choice, resolve
from headrace.sampling.grammar import GrammarCompiler
from headrace.sampling.params import SamplingParams
from headrace.worker.create import make_worker
from headrace.worker.drafting import DraftSource


def choose_gpu(device: str) -> GpuFacts | None:
    """The GPU that `device` (auto, cpu, cuda) means here; None: the CPU. ConfigError if one was asked for in vain."""
    from headrace.device.cuda import gpu_facts, maybe_present, unavailable_reason

    if device == "cpu" or (device == "auto" and not maybe_present()):
        return None
    if (reason := unavailable_reason()) is None:
        return gpu_facts()
    if device == "cuda":
        raise ConfigError(f"device cuda cannot be used: {reason}")
    print(f"headrace: running on the CPU, though a GPU seems to be there: {reason}", file=sys.stderr)
    return None


def _template(tokenizer: Tokenizer, chat: bool) -> ChatTemplate:
    template = ChatTemplate.of(tokenizer)
    return template.prepared() if chat else template


class Engine:
    """Submit prompts, step, read updates. Not thread-safe."""

    def __init__(self, args: EngineArgs, *, chat: bool = True):
        """Not `chat`: no conversation is expected, so the chat template is compiled when the first one comes."""
        self.checkpoint = open_checkpoint(resolve_model(args.model))
        self.spec = self.checkpoint.spec
        self._draft = open_draft(args.draft_model, args.speculate, self.checkpoint)
        # the tokenizer and the chat template are made in Python and weights are packed outside it: both at once
        with ThreadPoolExecutor(1) as beside:
            tokenizer = beside.submit(self.checkpoint.tokenizer)
            template = beside.submit(lambda: _template(tokenizer.result(), chat))
            self._load(args, lambda: tokenizer.result().to_json())
            self.tokenizer, self.chat_template = tokenizer.result(), template.result()
        if isinstance(self._draft, LoadedCheckpoint):
            check_same_tokens(self.tokenizer, self._draft)
        self._input = InputProcessor(
            self.tokenizer, self.spec, self.config.max_model_len, self.grammars, self.config.proposers
        )

    def _load(self, args: EngineArgs, tokenizer_json: Callable[[], str]) -> None:
        """The configuration, the model and the loop: what needs no tokenizer yet."""
        gpu = choose_gpu(args.device)
        files = [each for each in (self.checkpoint, self._draft) if each is not None]
        num_weights = sum(math.prod(file.shape(name)) for file in files for name in file.names()) if gpu else 0
        drafter, here = kind_of(self._draft), cpu_facts()
        draft_spec = getattr(self._draft, "spec", None)  # heads without layers have none
        self.config, layout, self.choices = resolve(args, self.spec, here, gpu, num_weights, drafter, draft_spec)
        self.grammars = GrammarCompiler(tokenizer_json, self.spec.vocab_size, self.spec.eos_token_ids)
        draft: DraftSource | None = None
        if self._draft is not None:
            draft, choices = draft_source(self._draft, self.spec, self.config, layout, here)
            self.choices += choices
        self._worker = make_worker(
            self.spec, self.checkpoint, self.config, layout, args.attention_backend, self.grammars, draft
        )
        self._executor = InProcessExecutor(self._worker)
        self.choices.append(
            Choice(
                "attention_backend",
                self._worker.attention_backend,
                "; ".join(f"{name} {', '.join(why)}" for name, why in self._worker.attention_refusals if why)
                or ("as asked" if args.attention_backend else "the first choice on this device"),
            )
        )
        drafting = getattr(self._worker, "proposer", None)
        for name, owner in (("step_kernel", self._worker), ("draft_step_kernel", drafting)):
            if (kernel := getattr(owner, "step_kernel", None)) is not None:
                self.choices.append(Choice(name, *kernel.state))
        weight_bytes = self._worker.model.weight_bytes
        if (read := getattr(self._worker, "weights_report", None)) is not None:
            self.choices.append(Choice("weights", f"{weight_bytes / 1e9:.2f} GB", f"read by a large step; {read}"))
        work = WorkModel.for_layout(self.spec, weight_bytes, layout)
        self.ledger: Ledger = NullLedger()
        self.cost = CostModel(self.ledger.facts)
        self._observer: LedgerObserver | None = None
        if self.config.ledger:
            arithmetic = "int8" if self.config.mode == "int8" else ""
            facts = machine_facts(arithmetic=arithmetic) if gpu is None else gpu_machine_facts(gpu.name)
            self.cost = CostModel(facts)
            self._cost_name = "|".join(
                (
                    self.checkpoint.name,
                    str(weight_bytes),
                    self.config.mode,
                    layout.kv_format,
                    self._worker.attention_backend,
                )
            )
            self.cost.restore(self._cost_name)
            self._num_restored = self.cost.num_observed
            self.ledger = Ledger(facts)
            self._observer = LedgerObserver(
                self.ledger, work, self.cost, self.config.max_num_seqs, proposers=self.config.proposers,
                together=8 if gpu is None else 1,
            )  # fmt: skip
        limits = SchedulerLimits(
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.config.max_model_len,
            self.config.scheduling,
        )
        kv = KVCacheManager(layout, self.config.prefix_caching)
        scheduler = Scheduler(limits, kv, self._draft_policy(work, draft), self._pacing(work), self._visits())
        observer: StepObserver = self._observer or NullObserver()
        self._core = EngineCore(scheduler, self._executor, self.config.steps_in_flight, observer)
        self._streams: dict[str, ChoiceStream] = {}  # core request id -> its choice
        self._ids = itertools.count()
        self._closed = False

    def _visits(self) -> Visits:
        """Steps of a GPU can run several times a visit, but for those whose tokens the host draws, as it does for the
        residual verifier."""
        overlaps = self.config.device != "cpu" and self.config.steps_in_flight > 1
        if not overlaps or self.config.verify == "residual":
            return OneRun()
        follows = getattr(getattr(self._worker, "proposer", None), "follows", False)
        return HostBound(follows and not self.config.draft_tree)

    def _draft_policy(self, work: WorkModel, draft: DraftSource | None) -> DraftPolicy:
        config = self.config
        if not config.proposers:
            return NoDrafts()
        if config.fixed_depth or not config.ledger:  # without a ledger no cost is learnt
            return FixedDepth(config.max_draft_tokens, config.proposers, config.draft_tree)
        networks = {}
        if draft is not None:
            for name, size in self._worker.proposer.weight_bytes.items():
                networks[name] = PassCost(self.cost, WorkModel.for_layout(draft.spec, size, draft.layout))
        policy = AutoDepth(self.cost, work, config.max_draft_tokens, config.proposers, networks)
        overlaps = config.device != "cpu" and config.steps_in_flight > 1
        look_ups = [source for source, name in enumerate(config.proposers) if name not in networks] if networks else []
        if not overlaps:
            return policy

        def tell(way: int) -> None:
            policy.accounts.way = way

        return RunAhead(policy, look_ups=look_ups, tell=tell)

    def _pacing(self, work: WorkModel) -> Pacing:
        if self.config.itl_slo is None and self.config.ttft_slo is None:
            return NoPacing()
        return SloPacing(self.cost, work, itl=self.config.itl_slo, ttft=self.config.ttft_slo)

    @property
    def default_params(self) -> SamplingParams:
        """What the model's generation_config recommends, over plain sampling."""
        return recommended_params(self.checkpoint)

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template (ChatTemplate.render says which keywords)."""
        template.setdefault("add_generation_prompt", not template.get("continue_final_message", False))
        return self.tokenizer.encode(self.chat_template.render(messages, **template), add_special=False)

    def device_report(self) -> list[str]:
        """Lines on what the worker did to run steps quickly (graphs of a GPU); none on a CPU."""
        report = getattr(self._worker, "report", None)
        return [] if report is None else list(report())

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured so far; 0 on a CPU."""
        return getattr(self._worker, "num_graphs", 0)

    @property
    def input(self) -> InputProcessor:
        """What checks prompts and makes requests of them."""
        return self._input

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def core(self) -> EngineCore:
        """The token-level engine, for benchmarks and checks."""
        return self._core

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        live: bool = True,
    ) -> RequestOutput:
        """Queue a prompt (text or token ids); its output fills as the engine steps. RequestError if it cannot be
        served, and then nothing is queued. Lower priorities are served first; prefixes are shared within a salt. Not
        `live`: its updates are not looked at, so the engine may tell of it only when it has ended."""
        if self._closed:
            raise RequestError("this engine has been closed; make a new one")
        params = params if params is not None else self.default_params
        request_id = request_id if request_id is not None else f"r{next(self._ids)}"
        prepared = self._input.prepare(
            request_id, prompt, params, add_special=add_special, priority=priority, cache_salt=cache_salt
        )
        output = RequestOutput(
            request_id, prepared.prompt, prepared.token_ids, [CompletionOutput(i) for i in range(params.num_choices)]
        )
        # unless every token is looked at, text is made of all of them at once when a request ends
        watched = live or params.stop or params.logprobs is not None or params.num_choices > params.n
        queued = []
        try:
            for request in prepared.queue:
                request.quiet = not watched and request.beam is None
                self._core.add(request)
                queued.append(request.id)
        except Exception:
            self._core.abort(queued)
            raise
        for index, request in enumerate(prepared.requests[: params.num_choices]):
            self._streams[request.id] = ChoiceStream(output, index, params, self.tokenizer)
        return output

    def num_tokens(self, outputs: Sequence[RequestOutput]) -> int:
        """Tokens generated for some prompts so far, whether their outputs have been told of them or not."""
        told = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        mine = {id(output) for output in outputs}
        going = (key for key, stream in self._streams.items() if id(stream.output) in mine)
        return told + sum(map(self._core.scheduler.num_untold, going))

    def step(self) -> list[Update]:
        """Run one step and return what it added; [] when there is nothing to do."""
        return self._take(self._core.step())

    def abort(self, output: RequestOutput) -> list[Update]:
        """End a prompt's unfinished choices."""
        ids = [key for key, stream in self._streams.items() if stream.output is output]
        return self._take(self._core.abort(ids))

    def bill(self, request_id: str) -> Bill | None:
        """Where the time of a request of this id went, all its choices together (ledger/bill.py says how they are
        merged); so far, if it still runs. None: never heard of, ended too long ago, or no ledger is kept."""
        if self._observer is None:
            return None
        self._core.tell()
        bill = self._observer.bill(request_id)
        if bill is not None:
            return bill
        choices = (self._observer.bill(f"{request_id}/{index}") for index in itertools.count())
        bills = list(itertools.takewhile(lambda bill: bill is not None, choices))
        return merge([bill for bill in bills if bill is not None], request_id) if bills else None

    def _take(self, news_list: Iterable[TokenOutput]) -> list[Update]:
        updates = []
        for news in news_list:
            stream = self._streams.get(news.request_id)
            if stream is None:  # ended by a stop string while this was in flight
                continue
            updates.extend(stream.add(news))
            if stream.choice.finish_reason is not None:
                del self._streams[news.request_id]
                if news.finish_reason is None:
                    self._core.abort([news.request_id], FinishReason.STOP)
        return updates

    @property
    def has_work(self) -> bool:
        return bool(self._streams) or self._core.has_work

    def close(self) -> None:
        """End everything that runs and let go of the model. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._core.abort(list(self._streams))
        self._streams.clear()
        self.ledger.close()
        if self._observer is not None and self._observer.cost.num_observed >= self._num_restored + _WORTH_KEEPING:
            self._observer.cost.save(self._cost_name)
        self._executor.stop()


_WORTH_KEEPING = 32  # steps observed: fewer teach the cost model too little to be kept
