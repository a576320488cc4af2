"""What speculation brought, by the records of a ledger, and from which acceptance on it pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from headrace.core.drafting import break_even, expected_tokens
from headrace.ledger.explain import line_text, seconds_text
from headrace.ledger.record import StepRecord

_FEW = 3  # steps that a time is taken from, at least


class _Depth(NamedTuple):
    """Measured seconds of steps of one depth, medians."""

    depth: float  # drafts a row
    num_steps: int
    step: float  # without drafting
    drafting: float  # what proposing for the next step took


def explain_speculation(records: Sequence[StepRecord]) -> str:
    """Acceptance by proposer, what verifying so many drafts took, and the acceptance at which that is worth it.

    Times are those of steps without prefill and with the number of requests that most steps had. With acceptance a
    of each draft, a verification of k brings (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al. 2023, equation 1); k
    drafts break even at the a where these are as many as the step's time, over that of a step without drafts.
    """
    drafted = [record for record in records if record.drafts]
    if not drafted:
        return "no step verified drafts; speculation is off (--speculate auto), or nothing was worth verifying"
    uses = [use for record in drafted for use in record.drafts]
    lines = [f"speculation: {len(drafted)} of {len(records)} steps verified drafts"]
    for name in sorted({use.proposer for use in uses}):
        own = [use for use in uses if use.proposer == name]
        spans, tried = sum(use.num_spans for use in own), sum(use.num_drafts for use in own)
        right = sum(use.num_accepted for use in own)
        lines.append(
            line_text(
                name,
                f"{right} of {tried} drafts right ({right / tried:.0%}) in {spans} verifications of "
                f"{tried / spans:.1f} on average; {1 + right / spans:.2f} tokens each",
            )
        )
    spent = sum(record.times.draft for record in records)
    whole = sum(record.total for record in records)
    lines.append(line_text("drafting", f"{seconds_text(spent)}, {spent / whole:.1%} of all steps' time"))
    lines.append("  k drafts bring (1 - a^(k+1)) / (1 - a) tokens if each is right with probability a")
    return "\n".join([*lines, *_table(records)])


def _table(records: Sequence[StepRecord]) -> list[str]:
    plain = [record for record in records if not record.num_prefill_tokens and record.num_decode_tokens]
    counts = Counter(record.num_spans for record in plain if record.drafts)
    if not counts:
        return []
    rows = counts.most_common(1)[0][0]
    depths = _depths([record for record in plain if record.num_spans == rows], rows)
    if not depths or depths[0].depth:
        return [line_text("", "no step without drafts was recorded to compare with: run some requests without")]
    base = depths[0].step
    lines = [f"  measured with {rows} in a step; a step without drafts takes {seconds_text(base)}"]
    titles = ("k", 5), ("steps", 7), ("step", 10), ("drafting", 10), ("cost", 7), ("break-even a", 14)
    lines.append("  " + "".join(f"{name:>{width}}" for name, width in titles) + f"{'gain at a=0.8':>15}")
    for each in depths[1:]:
        cost = (each.step + each.drafting) / base
        even = break_even(max(1, round(each.depth)), cost)
        gain = expected_tokens(0.8, round(each.depth)) / cost
        shown = f"{even:.2f}" if even < 1 else "never"
        lines.append(
            f"  {each.depth:>5.1f}{each.num_steps:>7}{seconds_text(each.step):>10}{seconds_text(each.drafting):>10}"
            f"{cost:>6.2f}x{shown:>14}{gain:>14.2f}x"
        )
    return lines


def _depths(records: Sequence[StepRecord], rows: int) -> list[_Depth]:
    groups: dict[int, list[StepRecord]] = {}
    for record in records:
        groups.setdefault(record.num_decode_tokens - rows, []).append(record)
    return [
        _Depth(
            count / rows,
            len(each),
            median(record.total - record.times.draft for record in each),
            median(record.times.draft for record in each),
        )
        for count, each in sorted(groups.items())
        if len(each) >= _FEW
    ]
