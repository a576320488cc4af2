"""What a run spends its time on: a trace of every call and kernel, beside the ledger's records of the same steps.

On a GPU torch's profiler writes a Chrome trace (for ui.perfetto.dev), on a CPU Python's own profiler a table. Both
slow the run down; how much of a step each kernel takes is what to read there, how long a step takes is the ledger's.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from headrace.frontend.engine import Engine
from headrace.ledger.explain import amount_text, seconds_text
from headrace.ledger.jsonl import to_line

TRACE, CALLS, STEPS = "trace.json", "calls.txt", "steps.jsonl"
_ROWS = 25


def make_folder(folder: Path) -> None:
    """The folder for a profile. OSError says which folder cannot be written, and what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"no profile can be written into {folder}: {error.strerror}; name another folder") from None


@contextmanager
def profiled(engine: Engine, folder: str | PathLike[str]) -> Iterator[list[str]]:
    """Profile what happens inside the block, at any time of an engine's life. Afterwards `folder` has a trace or a
    table of calls, and the steps' records; the list that is yielded has lines to print. OSError: it cannot be written.
    """
    folder = Path(folder)
    make_folder(folder)
    ledger, lines = engine.ledger, list[str]()
    before = ledger.totals.steps
    on_gpu = engine.config.device != "cpu"
    with _gpu_profile(folder, lines) if on_gpu else _cpu_profile(folder, lines):
        yield lines
    lines += engine.device_report()
    records = ledger.records(ledger.totals.steps - before)
    (folder / STEPS).write_text("".join(to_line(record) + "\n" for record in records), encoding="utf-8")
    lines.append(f"{len(records)} steps in {folder / STEPS}: headrace explain {folder / STEPS}")


@contextmanager
def _gpu_profile(folder: Path, lines: list[str]) -> Iterator[None]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(folder / TRACE))
    kernels: list[Any] = [each for each in profiler.key_averages() if each.self_device_time_total > 0]
    kernels.sort(key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels)
    lines.append(f"kernels: {seconds_text(total / 1e6)} in all")
    for each in kernels[:_ROWS]:
        share, mean = each.self_device_time_total / total, each.self_device_time_total / each.count
        lines.append(f"  {share:5.1%}  {each.count:7d} x {mean:9.2f} us  {each.key[:70]}")
    lines.append(f"trace: {folder / TRACE} ({amount_text((folder / TRACE).stat().st_size, 'B')}), for ui.perfetto.dev")


@contextmanager
def _cpu_profile(folder: Path, lines: list[str]) -> Iterator[None]:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        yield
    finally:
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(4 * _ROWS)
    (folder / CALLS).write_text(text.getvalue(), encoding="utf-8")
    shown = text.getvalue().splitlines()
    first = next((index for index, line in enumerate(shown) if line.lstrip().startswith("ncalls")), 0)
    lines += [line.rstrip() for line in shown[first : first + _ROWS + 1]]
    lines.append(f"all calls of the engine's own thread: {folder / CALLS}")
