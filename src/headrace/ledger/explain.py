"""Records in words: one step (`explain_step`), or what a ledger holds (`summarize`). Plain text within 100 columns."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from headrace.ledger.bill import ITEMS, Bill
from headrace.ledger.book import Ledger
from headrace.ledger.machine import BUSY, RAISE
from headrace.ledger.record import BOUNDS, STAGES, StepRecord

WIDTH = 100
_MOST_GROUPS = 5
_INDENT = " " * 12


def seconds_text(seconds: float) -> str:
    """A duration with a fitting unit: "12.3 us", "4.56 ms", "1.20 s"."""
    if not math.isfinite(seconds):
        return "?"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}" if abs(seconds) < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def amount_text(value: float, unit: str) -> str:
    """A quantity with an SI prefix: "540 MB", "4.31 GFLOP"."""
    if not math.isfinite(value):
        return f"? {unit}"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def count_text(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def line_text(label: str, text: str) -> str:
    """An indented line under a label, wrapped."""
    first = f"  {label:<10}"
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=_INDENT))


def _cause(record: StepRecord) -> str:
    """Why the step is bound by what it is bound by, with the numbers."""
    verdict, work = record.judgement, record.work
    device = verdict.device_seconds
    needs = (
        f"its bytes need {seconds_text(verdict.bandwidth_seconds)} and its arithmetic "
        f"{seconds_text(verdict.compute_seconds)} at the machine's rates"
    )
    if device <= 0:
        return "host: the step ran no model"
    if verdict.bound == "bandwidth":
        rate = work.bytes_total / device
        return f"memory bandwidth: {amount_text(rate, 'B/s')}, {verdict.bandwidth_share:.0%} of the machine's; {needs}"
    if verdict.bound == "compute":
        rate = work.flops_total / device
        return f"arithmetic: {amount_text(rate, 'FLOP/s')}, {verdict.compute_share:.0%} of the machine's; {needs}"
    if verdict.outside_seconds > device:
        outside = seconds_text(verdict.outside_seconds)
        return f"host: {outside} outside the model, {seconds_text(device)} inside it; {needs}"
    return f"host: the model took {seconds_text(device)} where {needs}; dispatch or slow kernels take the rest"


def explain_step(record: StepRecord) -> str:
    """What one step did, how long it took, what bound it, and what was decided and refused on the way."""
    work = record.work
    lines = [
        f"step {record.step_id}: {count_text(record.num_spans, 'span')}, {record.num_prefill_tokens} prefill and "
        f"{record.num_decode_tokens} decode tokens, {record.num_output_tokens} given out"
    ]
    lines.append(
        line_text(
            "queue",
            f"{record.num_rows} running, {record.num_waiting} waiting; "
            f"{record.blocks_free} of {record.blocks_total} blocks free",
        )
    )
    stages = zip(STAGES, record.stages(), strict=True)
    text = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in stages if seconds >= 1e-7)
    guess = ""
    if record.predicted > 0 and record.total > 0:
        off = (record.predicted - record.total) / record.total
        guess = f" (predicted {seconds_text(record.predicted)}, {off:+.0%})"
    lines.append(line_text("time", f"{seconds_text(record.total)}{guess}: {text or 'no stage took time'}"))
    lines.append(
        line_text(
            "work",
            f"{amount_text(work.bytes_weights, 'B')} of weights, {amount_text(work.bytes_kv_read, 'B')} of KV read, "
            f"{amount_text(work.bytes_kv_write, 'B')} written; {amount_text(work.flops_linear, 'FLOP')} linear, "
            f"{amount_text(work.flops_attention, 'FLOP')} attention, {amount_text(work.flops_head, 'FLOP')} head",
        )
    )
    lines.append(line_text("bound", _cause(record)))
    for decision in record.decisions:
        over = f" over {', '.join(decision.alternatives)}" if decision.alternatives else ""
        reason = f": {decision.reason}" if decision.reason else ""
        lines.append(line_text("chose", f"{decision.what} = {decision.chosen}{over}{reason}"))
    lines += [line_text("refused", refusal) for refusal in record.refusals]
    if record.preempted:
        lines.append(line_text("preempted", ", ".join(record.preempted)))
    for use in record.prefixes:
        found = f"{use.num_cached} of {use.num_tokens} tokens found in the prefix cache"
        why = f"; {use.miss.reason}" if use.miss is not None else ""
        lines.append(line_text("admitted", f"request {use.request_id}: {found}{why}"))
    return "\n".join(lines)


class _Kind(NamedTuple):
    """Steps of one kind, summed. Mixed steps stand alone: their time cannot be split between the two honestly."""

    name: str
    records: list[StepRecord]

    @property
    def seconds(self) -> float:
        return sum(record.total for record in self.records)

    def row(self) -> str:
        """One line of the table."""
        prefill = sum(record.num_prefill_tokens for record in self.records)
        decode = sum(record.num_decode_tokens for record in self.records)
        seconds = self.seconds or math.nan
        rates = "".join(f"{_rate(tokens, seconds):>12}" for tokens in (prefill, decode))
        each = seconds_text(median(record.total for record in self.records))
        bounds = Counter[str]()
        for record in self.records:
            bounds[record.bound] += 1
        share = ", ".join(f"{name} {bounds[name] / len(self.records):.0%}" for name in BOUNDS if bounds[name])
        return f"  {self.name:<8}{len(self.records):>7}{seconds_text(self.seconds):>10}{each:>10}{rates}   {share}"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f}" if tokens and seconds > 0 else "-"


def _kinds(records: Iterable[StepRecord]) -> dict[str, _Kind]:
    kinds = {name: _Kind(name, []) for name in ("prefill", "decode", "mixed", "empty")}
    for record in records:
        prefill, decode = record.num_prefill_tokens > 0, record.num_decode_tokens > 0
        name = "mixed" if prefill and decode else "prefill" if prefill else "decode" if decode else "empty"
        kinds[name].records.append(record)
    return kinds


def group_texts(texts: Iterable[str]) -> list[tuple[int, str]]:
    """Equal texts but for words that hold a digit, counted: [(count, the latest of them)], the most frequent first."""
    counts: Counter[str] = Counter()
    latest: dict[str, str] = {}
    for text in texts:
        key = re.sub(r"\S*\d\S*", "#", text)
        counts[key] += 1
        latest[key] = text
    return [(count, latest[key]) for key, count in counts.most_common()]


def _shares(names: Sequence[str], values: Sequence[float]) -> str:
    whole = sum(values)
    if not whole > 0:
        return "no time was measured"
    return ", ".join(f"{name} {value / whole:.1%}" for name, value in zip(names, values, strict=True) if value > 0)


def _roof_line(kind: _Kind, ledger: Ledger) -> str:
    """What the model's stages of these steps reached of the machine's two rates."""
    device = sum(record.judgement.device_seconds for record in kind.records)
    if not device > 0:
        return "the model took no time"
    read = sum(record.work.bytes_total for record in kind.records) / device
    done = sum(record.work.flops_total for record in kind.records) / device
    facts = ledger.facts
    return (
        f"{read / 1e9:.1f} of {facts.read_bandwidth / 1e9:.1f} GB/s ({min(read / facts.read_bandwidth, 1.0):.0%}), "
        f"{done / 1e9:.1f} of {facts.flops / 1e9:.1f} GFLOP/s ({min(done / facts.flops, 1.0):.0%})"
    )


def _doubts(ledger: Ledger) -> str:
    """What to know of the machine's rates before the shares are believed; "" where they are as good as they get."""
    facts, measured = ledger.facts, ledger.measured
    texts = []
    if measured.granted < BUSY:
        texts.append(
            f"others used the machine when its rates were measured ({measured.granted:.0%} of the processor time was "
            "granted): they may be too low, and are measured again by a run ten minutes later"
        )
    for name, unit, now, before in (
        ("bandwidth", "B/s", facts.read_bandwidth, measured.read_bandwidth),
        ("arithmetic", "FLOP/s", facts.flops, measured.flops),
    ):
        if now > RAISE * before:
            texts.append(
                f"{name} raised from the measured {amount_text(before, unit)} to the {amount_text(now, unit)} that a "
                "step reached (out of a cache, or the machine was busy when it was measured)"
            )
    return "; ".join(texts)


def _judged(ledger: Ledger) -> list[StepRecord]:
    """The records, all held against the highest rates known by now."""
    return [record.judged(ledger.facts) for record in ledger.records()]


def _prediction_line(records: Iterable[StepRecord]) -> str:
    errors = [abs(r.predicted - r.total) / r.total for r in records if r.predicted > 0 and r.total > 0]
    if not errors:
        return "no step was predicted"
    middle, p90 = np.quantile(np.array(errors), (0.5, 0.9))
    return f"off by {middle:.1%} in the median step, {p90:.1%} at p90 ({count_text(len(errors), 'step')})"


def summarize(ledger: Ledger) -> str:
    """A ledger in one screen: steps and rates, where time went, roof reached, predictions, refusals, and a conclusion.

    Rates are those of the records still in the ring; the first line tells the totals of the ledger's whole life. Token
    rates count tokens run by the model; drafts that were not accepted are among the decode tokens.
    """
    records, totals = _judged(ledger), ledger.totals
    if not records:
        return "no steps recorded"
    kinds = _kinds(records)
    lines = [
        f"{count_text(totals.steps, 'step')} in {seconds_text(totals.seconds)}: {totals.prefill_tokens} prefill and "
        f"{totals.decode_tokens} decode tokens run, {totals.output_tokens} given out"
    ]
    if totals.steps > len(records):
        lines.append(f"below: the last {len(records)} steps")
    lines.append(f"  {'':<8}{'steps':>7}{'time':>10}{'median':>10}{'prefill/s':>12}{'decode/s':>12}   bound (of steps)")
    lines += [kind.row() for kind in kinds.values() if kind.records]
    stages = [sum(values) for values in zip(*(record.stages() for record in records), strict=True)]
    lines.append(line_text("stages", _shares(STAGES, stages)))
    by_bound = [sum(record.total for record in records if record.bound == bound) for bound in BOUNDS]
    lines.append(line_text("bound by", _shares(BOUNDS, by_bound)))
    for name in ("prefill", "decode", "mixed"):
        if kinds[name].records:
            lines.append(line_text(name, _roof_line(kinds[name], ledger)))
    if doubts := _doubts(ledger):
        lines.append(line_text("roof", doubts))
    lines.append(line_text("predicted", _prediction_line(records)))
    if totals.prompt_tokens:
        text = f"{totals.cached_tokens} of {totals.prompt_tokens} prompt tokens found ({totals.hit_rate:.1%})"
        lines.append(line_text("prefixes", text))
    lines += _bill_lines(ledger.bills())
    lines += _grouped("refused", (text for record in records for text in record.refusals))
    preempted = [request for record in records for request in record.preempted]
    if preempted:
        often, times = Counter(preempted).most_common(1)[0]
        lines.append(
            line_text("preempted", f"{count_text(len(preempted), 'time')}, request {often} most often ({times})")
        )
    if ledger.stream_error:
        lines.append(line_text("stream", f"ended early: {ledger.stream_error}"))
    lines.append(textwrap.fill(conclusion(ledger, kinds), WIDTH))
    return "\n".join(lines)


def _bill_lines(bills: Sequence[Bill]) -> list[str]:
    """Where the time of the requests that ended went, all together."""
    if not bills:
        return []
    names = [name.replace("_", " ") for name in ITEMS]
    shares = _shares(names, [sum(getattr(bill, name) for bill in bills) / 1e9 for name in ITEMS])
    each = seconds_text(median(bill.wall for bill in bills) / 1e9)
    return [line_text("requests", f"{len(bills)} ended, {each} in the median; {shares}")]


def _grouped(label: str, texts: Iterable[str]) -> list[str]:
    groups = group_texts(texts)
    lines = [
        line_text(label if index == 0 else "", f"{count} x {text}")
        for index, (count, text) in enumerate(groups[:_MOST_GROUPS])
    ]
    if len(groups) > _MOST_GROUPS:
        rest = sum(count for count, _ in groups[_MOST_GROUPS:])
        lines.append(line_text("", f"and {rest} others of {count_text(len(groups) - _MOST_GROUPS, 'kind')}"))
    return lines


def conclusion(ledger: Ledger, kinds: dict[str, _Kind] | None = None) -> str:
    """One sentence: what bounds the kind of step that took the most time, and what would help."""
    kinds = kinds or _kinds(_judged(ledger))
    kind = max((kinds[name] for name in ("decode", "prefill", "mixed")), key=lambda kind: kind.seconds)
    records = kind.records
    if not records:
        return "no step ran the model, so nothing bounds it."
    seconds = dict.fromkeys(BOUNDS, 0.0)
    for record in records:
        seconds[record.bound] += record.total
    bound = max(BOUNDS, key=lambda name: seconds[name])
    same = [record for record in records if record.bound == bound]
    device = sum(record.judgement.device_seconds for record in same)
    name = "mixed steps are" if kind.name == "mixed" else f"{kind.name} is"
    facts = ledger.facts
    if bound == "bandwidth":
        weights = sum(record.work.bytes_weights for record in same) / len(same)
        kv = sum(record.work.bytes_kv_read for record in same) / len(same)
        rate = sum(record.work.bytes_total for record in same) / device
        what = f"{amount_text(weights, 'B')} of weights" if weights >= kv else f"{amount_text(kv, 'B')} of KV"
        advice = (
            "more requests at once would raise throughput"
            if weights >= kv
            else "a smaller KV format would help more than more requests"
        )
        return (
            f"{name} bound by memory bandwidth: {what} a step at {rate / 1e9:.1f} of "
            f"{facts.read_bandwidth / 1e9:.1f} GB/s; {advice}."
        )
    if bound == "compute":
        rate = sum(record.work.flops_total for record in same) / device
        return (
            f"{name} bound by arithmetic: {rate / 1e9:.1f} of {facts.flops / 1e9:.1f} GFLOP/s; more requests at once "
            "would only wait longer."
        )
    outside = sum(record.judgement.outside_seconds for record in same)
    if outside > device:
        stages = [sum(values) for values in zip(*(record.stages() for record in same), strict=True)]
        cost = {stage: value for stage, value in zip(STAGES, stages, strict=True) if stage not in ("forward", "logits")}
        worst = max(cost, key=lambda stage: cost[stage])
        return (
            f"{name} bound by the host: {outside / (outside + device):.0%} of the time passes outside the model, most "
            f"of it in {worst}; larger steps would spread it."
        )
    roof = sum(max(record.judgement.bandwidth_seconds, record.judgement.compute_seconds) for record in same)
    return (
        f"{name} bound by the host: the model's stages take {device / max(roof, 1e-12):.1f} times what bytes and "
        "arithmetic need, so dispatch or slow kernels take the rest; fewer, larger operations would help."
    )
