"""What the machine was measured to do, and what share of it decoding reaches."""

from __future__ import annotations

import time
from pathlib import Path

from headrace.doctor.section import Section
from headrace.ledger.machine import BUSY, machine_facts

TOKENS = 48


def rates() -> Section:
    """Read bandwidth and float32 arithmetic, measured anew."""
    section = Section("Measured rates")
    facts = machine_facts(refresh=True)
    section.add("reading memory", f"{facts.read_bandwidth / 1e9:.1f} GB/s with {facts.num_threads} threads")
    section.add("float32", f"{facts.flops / 1e9:.0f} GFLOP/s in a large product of numpy")
    if facts.granted < BUSY:
        section.problems.append(
            f"others used the processor too ({facts.granted:.0%} of the time asked for was granted); "
            "measure again when the machine is quiet"
        )
    return section


def decode(model: str | None) -> Section:
    """One request of a model that is on disk already: tokens a second, and the share of the read bandwidth."""
    from headrace.frontend.llm import LLM
    from headrace.loading.store import list_models
    from headrace.sampling.params import SamplingParams

    section = Section("Decoding, one request")
    if model is None:
        known = list_models()
        if not known:
            section.add("measured", "no: no model is on disk (headrace pull fetches one)")
            return section
        model = str(known[0].path)
    with LLM(model, device="cpu", prefix_caching=False, max_num_seqs=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        llm.generate([[5, 6, 7, 8]], params)
        output = llm.engine.submit([5, 6, 7, 9], params)
        times = []
        while not output.finished:
            started = time.perf_counter()
            llm.engine.step()
            times.append(time.perf_counter() - started)
        times = sorted(times[1:])
        step = times[len(times) // 2]
        moved = llm.engine.ledger.records(1)[0].work.bytes_total / step
    facts = machine_facts()
    section.add("model", Path(model).name)
    section.add("speed", f"{1 / step:.0f} tokens/s (median of {len(times)} steps)")
    share = min(1.0, moved / facts.read_bandwidth)
    section.add("bytes moved", f"{moved / 1e9:.1f} GB/s, {share:.0%} of what the machine was measured to read")
    return section
