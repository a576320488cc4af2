"""Whether a GPU is there and can be used. torch is imported only where the system shows a GPU."""

from __future__ import annotations

from headrace.device.cuda import gpu_facts, maybe_present, unavailable_reason
from headrace.doctor.section import Section


def gpu() -> Section:
    """The GPU that `device=auto` would take, or why there is none."""
    section = Section("GPU")
    if not maybe_present():
        section.add("used", "no: the system shows no NVIDIA GPU")
        return section
    reason = unavailable_reason()
    if reason is not None:
        section.add("used", "no")
        section.problems.append(reason)
        return section
    facts = gpu_facts()
    section.add("name", f"{facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]}")
    section.add("memory", f"{facts.free_memory / 1e9:.1f} of {facts.total_memory / 1e9:.1f} GB free")
    section.add("processors", facts.num_processors)
    return section
