"""Steps that were sent to a GPU: where their results land, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.core.plan import StageTimes, StepPlan, StepResult, TokenLogprobs
from headrace.sampling.sampler import DAMAGED, Sampled


@dataclass
class Slot:
    """Where a step's result lands on the host."""

    # int32 [MOST_RUNS, max rows, 1 + most drafts], pinned, by run; of a span with d drafts the first 1 + d count
    drawn: torch.Tensor
    # what is recorded on its stream: to look for the current one takes longer than all the rest
    stream: torch.cuda.Stream | None
    started: torch.cuda.Event | None
    finished: torch.cuda.Event | None

    def __post_init__(self) -> None:
        self.host = self.drawn.numpy()  # the same memory

    def begin(self) -> None:
        """What is sent from now on is the step."""
        if self.started is not None:
            self.started.record(self.stream)

    def end(self) -> None:
        """All of the step has been sent."""
        if self.finished is not None:
            self.finished.record(self.stream)


class PendingStep:
    """A step that the GPU works on."""

    def __init__(
        self,
        plan: StepPlan,
        slot: Slot,
        yielding: np.ndarray,
        prepare: float,
        observe: Callable[[float, float], bool] | None,
        warming: bool = False,
    ):
        """`observe` is told the seconds that sending the step took, and that running it took, and says whether later
        ones will take less; `warming`: it is known that they will, see StepResult."""
        self._plan, self._slot, self._yielding, self._prepare = plan, slot, yielding, prepare
        self._warming = warming
        self._observe = observe
        self._result: StepResult | None = None
        self.settle: Callable[[StepResult], StepResult] | None = None  # told of the result once, and adds to it

    def drawn(self) -> np.ndarray:
        """Wait for the step; int32 [S, 1 + most drafts]: what it drew for each span, of one with d drafts in the first
        1 + d, up to the first that is negative."""
        if self._slot.finished is not None:
            self._slot.finished.synchronize()
        return self._slot.host[0, : self._plan.num_spans]

    def result(self) -> StepResult:
        """Wait for the step and read what it drew."""
        if self._result is None:
            result = self._read()
            self._result = result if self.settle is None else self.settle(result)
        return self._result

    def _read(self) -> StepResult:
        waited, slot, runs = 0.0, self._slot, self._plan.num_runs
        if slot.finished is not None and slot.started is not None:
            slot.finished.synchronize()
            waited = slot.started.elapsed_time(slot.finished) / 1e3
            if self._observe is not None:
                self._warming |= self._observe(self._prepare / runs, waited / runs)
        plan = self._plan
        drawn = slot.host[:runs, : plan.num_spans]
        each = drawn[:, :, 0]  # of every run
        tokens = each.T.tolist()
        errors = {}
        for index in np.flatnonzero((each < 0).any(axis=0) | ~self._yielding).tolist():
            tokens[index] = []
            if self._yielding[index]:
                errors[index] = DAMAGED
        drafted = np.flatnonzero(plan.num_drafts * self._yielding).tolist()
        by_run: list[list[int]] = []
        if drafted:
            num_drafts = plan.num_drafts.tolist()
            accepted: list[list[int]] = [[0] * runs for _ in tokens]
            for index in drafted:
                if index in errors:
                    continue
                tokens[index] = []
                for run, own in enumerate(drawn[:, index, : 1 + num_drafts[index]].tolist()):
                    kept = own[: own.index(-1)] if -1 in own else own
                    tokens[index] += kept
                    accepted[index][run] = len(kept) - 1
            by_run = accepted if runs > 1 else []
        return StepResult(
            plan.step_id,
            tokens=tokens,
            num_accepted=[max(0, len(each) - runs) for each in tokens] if drafted else [0] * len(tokens),
            num_runs=runs,
            accepted_by_run=by_run,
            errors=errors,
            warming=self._warming,
            # what of sending it the GPU did not hide: where there is any, the host is what bounds the step
            times=StageTimes(prepare=max(0.0, self._prepare - waited), forward=waited),
        )


class FinishedStep:
    """A step whose result is known."""

    def __init__(self, result: StepResult):
        self._result = result

    def result(self) -> StepResult:
        return self._result


def merged(result: StepResult, sampled: Sampled, prompt_logprobs: dict[int, list[TokenLogprobs]]) -> StepResult:
    """What the GPU drew and what the host drew, as one result."""
    tokens = list(result.tokens)
    for span in np.flatnonzero(sampled.counts).tolist():
        tokens[span] = sampled.tokens[span, : sampled.counts[span]].tolist()
    damaged = {span: DAMAGED for span, entries in prompt_logprobs.items() if not all(entries)}
    return replace(
        result,
        tokens=tokens,
        num_accepted=[max(0, len(each) - 1) for each in tokens],
        candidates=sampled.candidates,
        errors={**result.errors, **damaged, **sampled.errors},
        logprobs=sampled.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
