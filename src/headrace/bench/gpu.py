"""The GPU table: decode, time to first token, long and skewed contexts, offline throughput and start, beside a peer.

Each side is a process of its own (gpu_side.py), one after the other on the same GPU, or at once on two GPUs of one
host. Models are shapes with made-up weights, whose speed is that of real ones, or folders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bench.results import Row, write_results
from headrace.bench.shapes import SHAPES, write_shape
from headrace.device.cuda import gpu_facts, unavailable_reason
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.store import resolve_model

SCRIPT = Path(__file__).with_name("gpu_side.py")
LONGEST = 131072
# where compilers and engines keep what the next start can use
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Case:
    """One row. `target`: the ratio to the peer that we ask of ourselves."""

    kind: str  # decode, ttft, skewed, offline
    target: float | None = None
    batch: int = 1
    tokens: int = 0  # prompt, of ttft
    context: int | None = None  # of long and skewed decode
    requests: int = 0
    runs: int | None = None  # fewer than the table's, where one takes long

    @property
    def name(self) -> str:
        """As in the results files, after model and format."""
        if self.kind == "ttft":
            return f"ttft {self.tokens}"
        if self.kind == "offline":
            return "offline"
        if self.kind == "skewed":
            return f"skewed decode, one row of {self.context} beside {self.batch - 1} of 1000"
        return f"decode batch {self.batch}" if self.context is None else f"context {self.context} batch {self.batch}"

    @property
    def unit(self) -> str:
        return "tok/s" if self.kind == "offline" else "ms"


def _decodes(targets: dict[int, float]) -> list[Case]:
    return [Case("decode", target, batch=batch) for batch, target in targets.items()]


CASES: dict[str, list[Case]] = {
    "llama-3.1-8b": [
        *_decodes({1: 1.2, 8: 1.15, 32: 1.15, 128: 1.1, 256: 1.05}),
        Case("ttft", 1.4, tokens=1024),
        Case("ttft", 1.0, tokens=8000),
        Case("decode", 1.1, batch=1, context=32768),
        Case("decode", 1.1, batch=8, context=32768, runs=1),
        Case("skewed", 1.1, batch=32, context=120000, runs=1),
        Case("offline", 1.2, requests=1024),
    ],
    "llama-3.2-1b": [
        *_decodes({1: 1.8, 8: 1.8, 32: 1.5, 256: 1.3}),
        Case("ttft", None, tokens=1024),
        Case("ttft", None, tokens=8000),
        Case("offline", 1.5, requests=1024),
    ],
    "smollm2-135m": [
        *_decodes({1: 3.0, 64: 2.0, 256: 2.0}),
        Case("ttft", None, tokens=1024),
        Case("offline", 2.0, requests=1024),
    ],
    "tiny": [Case("decode", batch=2), Case("ttft", tokens=64), Case("offline", requests=4)],
}


class Side:
    """The process of one engine, whose lines are gathered as they come."""

    def __init__(
        self, engine: str, python: str, work: dict[str, Any], log: Path, device: int | None, caches: Path | None
    ):
        """`caches`: an empty folder in place of the machine's caches, None: those."""
        self._engine = engine
        environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
        if caches is not None:
            environment.update({name: str(caches / engine / name) for name in CACHES})
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(device)
        self._log = log
        self._said = log.open("w")
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-P", str(SCRIPT), engine],  # -P: modules beside the script are not in anybody's way
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work))
        self._process.stdin.close()
        self.rows: dict[str, dict[str, Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                row = json.loads(line)
            except ValueError:
                self._said.write(line)
                continue
            if row["case"] == "start":
                row["value"] = time.perf_counter() - self._started
            self.rows[row["case"]] = row
            self._said.write(json.dumps(row) + "\n")
            self._said.flush()

    def finish(self) -> dict[str, dict[str, Any]]:
        """Wait for its end. ValueError where it failed; rows that it had are in the message's log."""
        code = self._process.wait()
        self._reader.join()
        self._said.close()
        if code:
            last = next((line for line in reversed(self._log.read_text().splitlines()) if line.strip()), "")
            hint = "; --peer-python names the Python that has it" if "No module named" in last else ""
            why = f" ({last[:200]})" if last and not last.startswith("{") else ""
            raise ValueError(f"{self._engine} ended with exit code {code}{why}; its output is in {self._log}{hint}")
        return self.rows


@dataclass(frozen=True)
class Setup:
    """What is compared, and how."""

    model: str  # a shape, or a folder
    peer: str | None = "vllm"
    peer_python: str = sys.executable
    peer_device: int | None = None  # a second GPU, on which the peer runs at the same time
    runs: int = 3
    names: Sequence[str] = ()  # of cases, "start" for none but the start; none: all
    offline: int | None = None  # requests, instead of the case's own number
    cold: bool = False  # both sides start with every cache empty


def chosen_cases(setup: Setup) -> list[Case]:
    """Those of the model. ValueError: a name that it has not."""
    cases = CASES.get(setup.model, CASES["llama-3.1-8b"])
    known = {case.name for case in cases} | {"start"}
    if unknown := set(setup.names) - known:
        raise ValueError(f"no case {sorted(unknown)[0]!r}; there are {', '.join(sorted(known))}")
    return [case for case in cases if not setup.names or case.name in setup.names]


def need_gpu(what: str) -> None:
    """ValueError, which begins with `what`, where no GPU can be used."""
    reason = unavailable_reason()
    if reason is not None:
        raise ValueError(f"{what}: {reason}")


def compare_on_gpu(setup: Setup, folder: Path, tell: Callable[[str], None]) -> list[Row]:
    """Run both sides; their logs, with every run's value, stay in `folder`."""
    cases = chosen_cases(setup)
    folder.mkdir(parents=True, exist_ok=True)
    needs = [LONGEST for case in cases if case.context is not None]
    seqs = 512 if any(case.kind == "offline" for case in cases) else 256
    with tempfile.TemporaryDirectory() as made:
        model = write_shape(setup.model, Path(made)) if setup.model in SHAPES else setup.model
        work = {
            "model": model,
            "options": {"max_model_len": max(needs, default=8192), "max_num_seqs": seqs},
            "runs": setup.runs,
            "cases": [
                {**asdict(case), "name": case.name, "requests": setup.offline or case.requests} for case in cases
            ],
        }
        name = Path(setup.model).name

        def start(engine: str, python: str, device: int | None) -> Side:
            tell(f"{engine} starts")
            log = folder / log_name(name, engine, setup.cold)
            return Side(engine, python, work, log, device, Path(made) / "caches" if setup.cold else None)

        peer = start(setup.peer, setup.peer_python, setup.peer_device) if setup.peer else None
        if peer is not None and setup.peer_device is None:
            peer.finish()
        ours = start("headrace", sys.executable, None).finish()
        theirs = {} if peer is None else peer.finish() if setup.peer_device is not None else peer.rows
    return table(name, cases, ours, theirs, setup.cold)


def table(model: str, cases: Sequence[Case], ours: dict[str, Any], theirs: dict[str, Any], cold: bool) -> list[Row]:
    """A row a case, the start first."""
    peer_name = theirs["start"]["name"] if theirs else None

    def row(name: str, unit: str, target: float | None, count: int) -> Row:
        shown = f"start-{'cold' if cold else 'warm'}" if name == "start" else name
        return Row(
            case=f"{model} bf16 {shown}",
            unit=unit,
            better="higher" if unit == "tok/s" else "lower",
            headrace=ours[name]["value"],
            peer=theirs[name]["value"] if theirs else None,
            peer_name=peer_name,
            limit_share=ours[name].get("limit_share"),
            runs=count,
            target=target,
        )

    rows = [row("start", "s", None, 1)]
    for case in cases:
        rows.append(row(case.name, case.unit, case.target, len(ours[case.name]["values"])))
    return rows


def table_of_logs(model: str, folder: Path, peer: str | None, cold: bool) -> tuple[list[Row], list[str]]:
    """(rows, cases that a side lacks) of a comparison whose logs are in `folder`, also of one that was broken off.
    ValueError: a log is missing, or holds not even the start."""
    name = Path(model).name

    def side(engine: str) -> dict[str, Any]:
        path = folder / log_name(name, engine, cold)
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read ({error.strerror}); name the folder of the logs with --logs and the model "
                "with -m, or leave out --from-logs to measure"
            ) from None
        rows = {row["case"]: row for row in map(_row_of, lines_of_rows(lines)) if row is not None}
        if "start" not in rows or (engine != "headrace" and "name" not in rows["start"]):
            raise ValueError(f"{path}: has no row of the start, so it is no whole log; measure again")
        return rows

    ours, theirs = side("headrace"), side(peer) if peer else {}
    known = [case for case in chosen_cases(Setup(model)) if case.name in ours or case.name in theirs]
    complete = [case for case in known if case.name in ours and (case.name in theirs or not peer)]
    missing = [case.name for case in known if case not in complete]
    return table(name, complete, ours, theirs, cold), missing


def _row_of(line: str) -> dict[str, Any] | None:
    """The row that a line of a log holds; None of a line that was cut off, whose case is missing then."""
    try:
        row = json.loads(line)
        sound = isinstance(row["case"], str) and isinstance(row["value"], int | float)
        return row if sound and (row["case"] == "start" or isinstance(row["values"], list)) else None
    except (ValueError, KeyError, TypeError):
        return None


def lines_of_rows(lines: Sequence[str]) -> list[str]:
    """Those lines of a log that hold a row."""
    return [line for line in lines if line.startswith('{"case"')]


def log_name(model: str, engine: str, cold: bool) -> str:
    return f"{model}{'.cold' if cold else ''}.{engine}.log"


def write_table(path: Path, rows: list[Row], missing: Sequence[str] = ()) -> None:
    """The results file. `missing`: cases that a side has no value of."""
    write_results(path, path.stem, rows, "torch", "triton", more={"missing": list(missing)} if missing else None)


def tune_model(model: str | None, say: Callable[[str], None]) -> Path:
    """Measure a model's products on this GPU (tiles.py); returns the file that later starts read. ValueError: there
    is no GPU to measure on."""
    need_gpu("tiles are measured on a GPU")
    import torch

    from headrace.bench.tiles import Measured, tune

    def tell(measured: Measured) -> None:
        product, tile = measured.product, measured.tile
        gain = f"{measured.before:8.1f} us, best {measured.best:8.1f} us"
        cut = f"{tile.rows} x {tile.inner}, {tile.split} parts, {tile.stages} stages" if tile else "the library's"
        say(f"{product.kind:6} {product.tokens:3} x {product.rows} x {product.inner}: {gain} ({cut})")

    spec = open_checkpoint(resolve_model(model)).spec
    return tune(spec, torch.device("cuda"), gpu_facts().name, tell)
