"""Whether a GPU is there and can be used. torch is imported only where the system shows a GPU."""

from __future__ import annotations

from importlib import metadata

from headrace.device.cuda import gpu_facts, maybe_present, unavailable_reason
from headrace.doctor.section import Section
from headrace.ledger.gpu import gpu_machine_facts


def gpu(measure: bool = True) -> Section:
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
    section.add("software", ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton")))
    from headrace.ops.triton.runtime import KNOWN_INSIDE

    own = "quick, as this Triton's inside is known" if KNOWN_INSIDE else "Triton's own, which cost the host more"
    section.add("calls", own)
    early = facts.capability >= (9, 0)
    section.add("launches", "kernels start while the one before ends" if early else "kernels start one after the other")
    from headrace.attention.select import backends_of

    for name, backend in backends_of("cuda").items():
        missing = getattr(backend, "unavailable", lambda: None)()
        if "cuda" not in backend.caps.devices:
            state = f"runs on {', '.join(sorted(backend.caps.devices))} only"
        elif name == "triton":
            state = "first choice, with the library's for long prompts without a prefix"
        else:
            state = f"refused: {missing}" if missing else f"only where asked for: attention_backend={name}"
        section.add(f"attention {name}", f"{state}; KV as {', '.join(sorted(backend.caps.kv_formats))}")
    _step_kernel(section, facts.capability)
    _tables(section)
    if measure:
        rates = gpu_machine_facts(facts.name)
        section.add("reading", f"{rates.read_bandwidth / 1e12:.2f} TB/s")
        section.add("bfloat16", f"{rates.flops / 1e12:.0f} TFLOP/s in a large product")
    return section


def _step_kernel(section: Section, capability: tuple[int, int]) -> None:
    """Whether decode steps of a few rows can run as one kernel, which nvcc compiles at first use."""
    from headrace.ops.cuda.library import compiler_version, find_compiler, library_folder, unavailable

    compiler = find_compiler()
    if (missing := unavailable(capability)) is not None or compiler is None:
        section.add("step kernel", f"not used: {missing}")
        return
    count = len(list(library_folder().glob("step_*.so")))
    version = compiler_version(compiler)
    section.add("step kernel", f"compiled at first use by nvcc {version} ({compiler}); {count} are there")


def _tables(section: Section) -> None:
    """What was measured on this GPU; a damaged table, which keeps engines from starting, is a problem."""
    from headrace.ops.triton.attention_table import measured_rules
    from headrace.ops.triton.tile_table import measured_tiles

    try:
        section.add("thresholds", f"{len(measured_rules())} shapes of attention measured (headrace bench attention)")
    except ValueError as error:
        section.problems.append(str(error))
    try:
        section.add("tiles", f"{len(measured_tiles())} measured for this GPU, a rule for others (headrace bench tiles)")
    except ValueError as error:
        section.problems.append(str(error))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
