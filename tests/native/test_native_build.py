"""The library as it is built: without a compiler, under sanitizers, in a child process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/headrace/ops/native/csrc"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


# setuptools wants to be the first to import distutils, so setup.py is read by processes of their own
READ_SETUP = """
import importlib.util, json, pathlib, sys
spec = importlib.util.spec_from_file_location("headrace_setup", "setup.py")
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)
"""


def with_setup(code: str, *arguments: str) -> str:
    """What lines of Python print that have setup.py as `setup` and `arguments` as sys.argv[1:]."""
    command = [sys.executable, "-c", READ_SETUP + code, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_source_files_stay_small() -> None:
    for source in SOURCES.iterdir():
        assert len(source.read_text().splitlines()) <= 500, source.name


def test_installs_without_a_compiler(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(SOURCES, tmp_path / SOURCES.relative_to(ROOT))
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "were not built (no C++ compiler" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
@pytest.mark.parametrize("source", ["path_avx2", "path_avx512", "path_amx", "path_amx_emulated"])
def test_a_compiler_that_does_not_know_a_path_leaves_it_out(source: str) -> None:
    """It is asked for its flags first; without them the file says that the path is not there."""
    asked = 'print(json.dumps([setup._takes(["g++"], [flag]) for flag in ("-O1", "-mno-such-instructions")]))'
    assert json.loads(with_setup(asked)) == [True, False]
    common = json.loads(with_setup("print(json.dumps(setup.COMMON))"))
    command = ["g++", *common, "-fsyntax-only", str(SOURCES / f"{source}.cpp")]
    subprocess.run(command, check=True)


def test_the_best_path_that_runs_is_taken() -> None:
    """In a process of its own, which nothing tells what to take; the emulated path is never taken by itself."""
    script = """
from headrace.ops.native.library import PATH_STATES, library, path_states
runs = [path for path, state in path_states().items() if state == PATH_STATES[2]]
print(library().path == runs[0], *path_states())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_NATIVE")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "amx", "avx512", "avx2", "portable"]


def test_a_forked_child_computes(tmp_path: Path) -> None:
    script = """
import os, numpy as np
from headrace.ops.native.library import library
from headrace.ops.native.packed import Arena, pack, packed_linear, stored_float32
library().set_num_threads(3)
x = np.ones((40, 512), np.float32)
weight = pack([stored_float32(np.ones((600, 512), np.float32))], 512, Arena())
run = packed_linear.variants["native"]
assert (run(x, weight) == 512).all()
child = os.fork()
good = (run(x, weight) == 512).all()
if child == 0:
    os._exit(0 if good else 1)
assert good and os.waitpid(child, 0)[1] == 0
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


@needs_compiler
@pytest.mark.slow
def test_the_pool_has_no_races(tmp_path: Path) -> None:
    program = tmp_path / "pool_check"
    sources = [str(Path(__file__).with_name("pool_check.cpp")), str(SOURCES / "pool.cpp")]
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", f"-I{SOURCES}", "-pthread"]
    subprocess.run(["g++", *flags, *sources, "-o", str(program)], check=True)
    options = "halt_on_error=1 die_after_fork=0"
    done = subprocess.run([str(program)], env={"TSAN_OPTIONS": options}, capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout does not suit the race detector")
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


SANITIZERS = {  # flags of the compiler, the runtime that a Python must have loaded first, its options
    "address and undefined behaviour": (
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0"},
    ),
    "threads": (("-fsanitize=thread",), "libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1 die_after_fork=0"}),
}
# What calls every kernel: on every code path, through Python and replayed, in products of experts and in whole engines.
SANITIZED = (
    "test_packed.py",
    "test_bf16_products.py",
    "test_pointwise.py",
    "test_native_attention.py",
    "test_attention_on_tiles.py",
    "test_recording.py",
    "test_native_model.py",
    "test_online_quantisation.py",
    "../loading/test_gguf_strings.py",
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", SANITIZERS)
def test_the_kernels_under_sanitizers(tmp_path: Path, name: str) -> None:
    flags, runtime, options = SANITIZERS[name]
    library = tmp_path / "libheadrace.so"
    build = "setup.build_library(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), tuple(sys.argv[3:]))"
    with_setup(build, str(library), str(tmp_path / "objects"), *flags, "-O1", "-g1")
    found = subprocess.run(["g++", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        **options,
        "LD_PRELOAD": found.stdout.strip(),
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads are not instrumented, and would look like races
        "HEADRACE_NATIVE_LIBRARY": str(library),
    }
    if name == "threads":
        probe = subprocess.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True)
        if "unexpected memory mapping" in probe.stderr:
            pytest.skip("this kernel's address layout does not suit the race detector")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--capture=sys",
        *(str(Path(__file__).parent / file) for file in SANITIZED),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
