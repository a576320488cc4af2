"""What a ledger says of requests, in words: a bill, the misses of the prefix cache, preemptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.core.plan_builder import PrefixUse
from headrace.ledger.bill import ITEMS, Bill, merge
from headrace.ledger.explain import count_text, group_texts, line_text, seconds_text
from headrace.ledger.machine import MachineFacts
from headrace.ledger.record import StepRecord

_MEANING = {
    "queued": "before it was first admitted",
    "prefill": "its own share of steps that ran its prompt",
    "decode": "its own share of steps that ran what it generated",
    "waiting": "on others: the rest of those steps",
    "held_back": "steps that ran without it though it had a row",
    "preempted": "off the table, its blocks given to others",
    "between": "no step ran",
}
_MOST_LINES = 40


class Admission(NamedTuple):
    """A request's first admission: in which step, and what the prefix cache had."""

    step_id: int
    use: PrefixUse


def facts_of(records: Iterable[StepRecord]) -> MachineFacts:
    """The highest of the machine's rates that the records were judged by; 1 for a rate that none of them tells."""
    bandwidth = flops = 1.0
    for record in records:
        verdict, work = record.judgement, record.work
        if verdict.bandwidth_seconds > 0 and verdict.compute_seconds > 0:
            bandwidth = max(bandwidth, work.bytes_total / verdict.bandwidth_seconds)
            flops = max(flops, work.flops_total / verdict.compute_seconds)
    return MachineFacts("of the file", bandwidth, flops, 1, 0.0)


def find_bill(bills: Sequence[Bill], request_id: str) -> Bill:
    """The bill of a request, its choices merged; ValueError names some that there are."""
    exact = [bill for bill in bills if bill.request_id == request_id]
    if exact:
        return exact[-1]
    choices = [bill for bill in bills if bill.request_id.rpartition("/")[0] == request_id]
    if choices:
        return merge(choices, request_id)
    known = ", ".join(bill.request_id for bill in bills[:8]) + (" ..." if len(bills) > 8 else "")
    raise ValueError(f"no bill of request {request_id!r}; there are bills of {known or 'no request'}")


def explain_bill(bill: Bill, records: Sequence[StepRecord] = ()) -> str:
    """A bill as a table, and one sentence on what would have made the request faster; `records` of the same ledger
    let it name causes."""
    ended = "still running" if bill.finish_reason is None else f"ended by {bill.finish_reason}"
    first = "" if bill.first_token is None else f", first token after {_time(bill.first_token)}"
    tokens = f"{bill.prompt_tokens} of prompt, {bill.cached_tokens} of them found in the prefix cache"
    again = f", {bill.recomputed_tokens} run again after {count_text(bill.preemptions, 'preemption')}"
    lines = [
        f"request {bill.request_id}: {_time(bill.wall)}{first}; {ended}",
        line_text(
            "tokens",
            f"{tokens}; {bill.output_tokens} of output{again if bill.preemptions else ''}; "
            f"{count_text(bill.steps, 'step')}",
        ),
    ]
    if bill.draft_tokens:
        share = bill.accepted_draft_tokens / bill.draft_tokens
        told = f"{bill.accepted_draft_tokens} of {bill.draft_tokens} that were verified were right ({share:.0%})"
        lines.append(line_text("drafts", told))
    for name, value in bill.items().items():
        share = value / bill.wall if bill.wall else 0.0
        label = name.replace("_", " ")
        lines.append(f"  {label:<10}{_time(value):>10}{share:>8.1%}   {_MEANING[name]}")
    lines.append(line_text("faster", advice(bill, records)))
    return "\n".join(lines)


def advice(bill: Bill, records: Sequence[StepRecord] = ()) -> str:
    """One sentence: what would have helped with the largest item of the bill."""
    items = bill.items()
    worst = max(ITEMS, key=lambda name: items[name])
    if not items[worst]:
        return "it took no time."
    part = f"{items[worst] / bill.wall:.0%} of its time"
    if worst == "queued":
        reasons = [
            text
            for record in records
            for text in record.refusals
            if any(text.startswith(f"request {name} not admitted") for name in _names(bill, records))
        ]
        if any("max_num_seqs" in text for text in reasons[-1:]):
            return f"{part} it queued because all rows were taken; a larger max_num_seqs would have let it in sooner."
        if reasons:
            return f"{part} it queued for memory ({_why(reasons[-1])}); a larger kv_cache would have let it in sooner."
        return f"{part} it queued while earlier steps ran; fewer requests at once, or shorter steps, would help."
    if worst == "prefill":
        missed = [each.use.miss for each in admissions(records) if each.use.request_id in _names(bill, records)]
        why = f" ({missed[0].reason})" if missed and missed[0] is not None else ""
        found = f"{bill.cached_tokens} of {bill.prompt_tokens} prompt tokens were found computed{why}"
        return f"{part} went into its own prompt; {found}, and every one more would have saved its share."
    if worst == "decode":
        return f"{part} went into its own decoding; only fewer output tokens or a faster arithmetic mode would help."
    if worst == "waiting":
        return (
            f"{part} its steps ran the tokens of others; a lower max_num_seqs or max_num_batched_tokens would have "
            "answered it sooner, and others later."
        )
    if worst == "held_back":
        return f"{part} the token budget or the free blocks went to others; more max_num_batched_tokens would help."
    if worst == "preempted":
        return (
            f"{part} it was off the table because the KV cache was full, and {bill.recomputed_tokens} tokens were run "
            "again; a larger kv_cache or a lower max_num_seqs would have kept it running."
        )
    return f"{part} no step ran: look at what the program does between steps."


def _names(bill: Bill, records: Sequence[StepRecord]) -> set[str]:
    """The request's id, and those of its choices."""
    known = {use.request_id for record in records for use in record.prefixes}
    return {bill.request_id, *(name for name in known if name.rpartition("/")[0] == bill.request_id)}


def _why(refusal: str) -> str:
    return refusal.partition(": ")[2] or refusal


def _time(nanoseconds: int) -> str:
    return seconds_text(nanoseconds / 1e9)


def admissions(records: Iterable[StepRecord]) -> list[Admission]:
    """First admissions, in order."""
    return [Admission(record.step_id, use) for record in records for use in record.prefixes]


def explain_misses(records: Sequence[StepRecord]) -> str:
    """What the prefix cache found, and why not more, for every request admitted."""
    found = admissions(records)
    if not found:
        return "no request was admitted, or the file is older than the notes on prefixes"
    asked, cached = sum(each.use.num_tokens for each in found), sum(each.use.num_cached for each in found)
    lines = [
        f"prefix cache: {cached} of {asked} prompt tokens found ({cached / max(asked, 1):.1%}), "
        f"{count_text(len(found), 'request')}"
    ]
    reasons = Counter(_kind(each.use) for each in found)
    lines.append(line_text("because", ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())))
    for step_id, use in found[:_MOST_LINES]:
        reason = use.miss.reason if use.miss is not None else "found as far as whole blocks go"
        lines.append(f"  request {use.request_id} (step {step_id}): {use.num_cached} of {use.num_tokens}; {reason}")
    if len(found) > _MOST_LINES:
        lines.append(f"  and {len(found) - _MOST_LINES} more")
    return "\n".join(lines)


def _kind(use: PrefixUse) -> str:
    if use.miss is None:
        return "found"
    (_, text), *_ = group_texts([use.miss.reason])
    for word, kind in (
        ("evicted", "evicted"),
        ("other token", "another token"),
        ("namespace", "nothing known in its namespace (salt, adapter)"),
        ("ends at", "more than what is known"),
        ("layer groups", "kept for some layer groups only"),
    ):
        if word in text:
            return kind
    return text


def explain_preemptions(records: Sequence[StepRecord], bills: Sequence[Bill] = ()) -> str:
    """Who was preempted when, and what it cost."""
    events = [(record, name) for record in records for name in record.preempted]
    if not events:
        return "nobody was preempted"
    names = Counter(name for _, name in events)
    lines = [f"{count_text(len(events), 'preemption')} of {count_text(len(names), 'request')}"]
    billed = [bill for bill in bills if bill.preemptions]
    if billed:
        lost, away = sum(bill.recomputed_tokens for bill in billed), sum(bill.preempted for bill in billed)
        lines.append(
            line_text("cost", f"{lost} tokens run again, {_time(away)} off the table, of requests that have ended")
        )
    for record, name in events[:_MOST_LINES]:
        lines.append(
            f"  step {record.step_id}: request {name}; {record.num_rows} running, {record.num_waiting} waiting, "
            f"{record.blocks_free} of {record.blocks_total} blocks free after it"
        )
    if len(events) > _MOST_LINES:
        lines.append(f"  and {len(events) - _MOST_LINES} more")
    lines.append("A larger kv_cache or a lower max_num_seqs would have avoided them.")
    return "\n".join(lines)
