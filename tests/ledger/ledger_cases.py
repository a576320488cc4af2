"""Small machines, models and records that the ledger's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.core.plan import StageTimes
from headrace.ledger.machine import MachineFacts
from headrace.ledger.record import Decision, StepRecord, judge
from headrace.ledger.work import StepWork
from headrace.models.spec import ModelSpec

FACTS = MachineFacts("test machine", read_bandwidth=20e9, flops=200e9, num_threads=2, measured_at=0.0)


def spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "norm_eps": 1e-6,
        "max_position": 512,
    }
    return ModelSpec(**{**values, **changes})


def spans(*columns: tuple[int, int]) -> np.ndarray:
    """int32 [4, S] from (start, length) pairs, one row each, no drafts."""
    table = [(row, start, length, 0) for row, (start, length) in enumerate(columns)]
    return np.array(table, np.int32).reshape(-1, 4).T


def record(step_id: int = 0, forward: float = 0.030, **changes: Any) -> StepRecord:
    """A decode step of 540 MB of weights at 90 % of FACTS' bandwidth, unless told otherwise."""
    work = changes.pop("work", StepWork(8, 8, 8, 520e6, 20e6, 1e5, 0.0, 4e9, 1e8, 2e8))
    times = changes.pop("times", StageTimes(1e-4, forward, 1e-4, 2e-4))
    outside = changes.get("schedule", 1e-4) + changes.get("commit", 1e-4)
    values: dict[str, Any] = {
        "step_id": step_id,
        "started_at": 1000.0 + step_id,
        "num_spans": 8,
        "num_prefill_tokens": 0,
        "num_decode_tokens": 8,
        "num_output_tokens": 8,
        "num_rows": 8,
        "num_waiting": 3,
        "blocks_free": 12,
        "blocks_total": 512,
        "work": work,
        "schedule": 1e-4,
        "times": times,
        "commit": 1e-4,
        "total": outside + times.total,
        "predicted": 0.031,
        "judgement": judge(FACTS, work, times, outside),
        "decisions": (Decision("chunk size", "256", ("512", "128"), "decodes wait"),),
        "refusals": (f"request {step_id} not admitted: needs 12 blocks, {step_id % 5} free",),
        "preempted": (),
    }
    return StepRecord(**{**values, **changes})
