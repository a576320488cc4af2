"""What a step does when the GPU's memory runs out, because other programs took it: it runs again in parts, and only a
request whose span alone does not fit ends, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from headrace.core.plan import StageTimes, StepPlan, StepResult

NO_MEMORY = (
    "the GPU's memory ran out, with nothing else in the step; other programs may use it: lower gpu_memory or "
    "max_num_batched_tokens"
)


class Running(Protocol):
    """A step that was sent."""

    def result(self) -> StepResult: ...


class StepTooLarge(RuntimeError):
    """The GPU's memory ran out before a step had changed the request table; or after `num_done` of its runs, which
    `done` knows the result of."""

    def __init__(self, message: str):
        super().__init__(message)
        self.done: Running | None = None
        self.num_done = 0


def without_drafts(plan: StepPlan) -> StepPlan:
    """The plan as if nothing had been drafted for it, and nobody drafts after it. To who made it, all drafts of the
    step were wrong."""
    spans = plan.spans.copy()
    spans[2] -= spans[3]
    spans[3] = 0
    num_runs = 1 if plan.num_drafts.any() else plan.num_runs
    return replace(plan, spans=spans, num_runs=num_runs, draft_limits=np.zeros((0, plan.num_spans), np.int32))


def run_in_parts(
    execute: Callable[[StepPlan], Running], plan: StepPlan, done: Running | None = None, num_done: int = 0
) -> StepResult:
    """The result of a plan that did not fit, whose changes to the table were made: nothing that a step writes is seen
    before its last kernel, so it can run again. Halves of its spans run one after the other, and halves of those.
    Of a step of several runs, `num_done` need not: `done`."""
    plan = replace(plan, admits=(), new_blocks=(), forks=(), block_copies=(), released=())
    return _run(execute, plan) if done is None else _rest(execute, plan, done, num_done)


def _run(execute: Callable[[StepPlan], Running], plan: StepPlan) -> StepResult:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return execute(plan).result()
    except StepTooLarge as error:  # beyond this block, what the exception held of the step is free
        done, num_done = error.done, error.num_done
    if done is not None:
        return _rest(execute, plan, done, num_done)
    if plan.num_spans == 1:
        return StepResult(plan.step_id, tokens=[[]], num_accepted=[0], num_runs=plan.num_runs, errors={0: NO_MEMORY})
    half = plan.num_spans // 2
    first, second = (
        _run(execute, replace(plan, spans=plan.spans[:, part], yields=plan.yields[part]))
        for part in (slice(0, half), slice(half, None))
    )
    return _joined(first, second, half)


def _rest(execute: Callable[[StepPlan], Running], plan: StepPlan, done: Running, num_done: int) -> StepResult:
    """The result of a plan of several runs, the first of which are done."""
    first, spans = done.result(), plan.spans.copy()
    spans[1] += num_done
    second = _run(execute, replace(plan, spans=spans, num_runs=plan.num_runs - num_done))
    errors = {**second.errors, **first.errors}
    tokens = [[*old, *new] for old, new in zip(first.tokens, second.tokens, strict=True)]
    told = [[] if span in errors else each for span, each in enumerate(tokens)]
    return replace(second, tokens=told, errors=errors, num_runs=plan.num_runs)


def _joined(first: StepResult, second: StepResult, half: int) -> StepResult:
    """One result of two, the second's spans behind the first's `half`."""

    def moved(entries: dict[int, object]) -> dict[int, object]:
        return {span + half: entry for span, entry in entries.items()}

    both = {
        name: {**getattr(first, name), **moved(getattr(second, name))}
        for name in ("candidates", "errors", "logprobs", "prompt_logprobs")
    }
    times = StageTimes(
        prepare=first.times.prepare + second.times.prepare, forward=first.times.forward + second.times.forward
    )
    return StepResult(
        first.step_id,
        tokens=first.tokens + second.tokens,
        num_accepted=first.num_accepted + second.num_accepted,
        num_runs=first.num_runs,
        times=times,
        **both,  # type: ignore[arg-type]
    )
