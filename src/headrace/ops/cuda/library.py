"""Building the kernels with nvcc, in the background, and calling them through a plain C interface."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from headrace.ops.cuda.shape import ProductCut, StepShape
from headrace.ops.triton.tile_table import user_folder

SOURCES = Path(__file__).with_name("csrc")
FLAGS = (
    "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "--shared", "-Xcompiler", "-fPIC",
)  # fmt: skip


class BuildError(RuntimeError):
    """The compiler refused; the message has its words."""


@cache
def find_compiler() -> Path | None:
    """nvcc: of CUDA_HOME, on the path, in /usr/local/cuda, or that of NVIDIA's wheels."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(each) / "bin" / "nvcc" for each in named if each]
    if (found := shutil.which("nvcc")) is not None:
        places.append(Path(found))
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    places += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"), reverse=True)
    return next((place for place in places if os.access(place, os.X_OK)), None)


@cache
def compiler_version(compiler: Path) -> str:
    """Such as 13.0.88. Raises BuildError where it does not run."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} does not run: {error}") from None
    match = re.search(r"V(\d+(?:\.\d+)+)", done.stdout)
    if done.returncode or match is None:
        raise BuildError(f"{compiler} --version says: {(done.stdout + done.stderr).strip()[-500:]}")
    return match[1]


def unavailable(capability: tuple[int, int]) -> str | None:
    """Why these kernels cannot be used on a GPU of this compute capability, or None."""
    if capability != (9, 0):
        return f"made for compute capability 9.0, not {capability[0]}.{capability[1]}"
    compiler = find_compiler()
    if compiler is None:
        return "there is no nvcc (CUDA 12.5 or newer; package nvidia-cuda-nvcc, or CUDA_HOME)"
    try:
        version = compiler_version(compiler)
    except BuildError as error:
        return str(error)
    if tuple(map(int, version.split(".")[:2])) < (12, 5):
        return f"{compiler} is of CUDA {version}, and 12.5 or newer is needed"
    return None


def library_folder() -> Path:
    """Where compiled kernels are kept."""
    return user_folder().with_name("cuda")


class Build:
    """A library of kernels for one shape: on disk, or being compiled by a process of its own."""

    def __init__(self, shape: StepShape, compiler: Path, folder: Path | None = None, extra: tuple[str, ...] = ()):
        """Starts the compiler if the library is not there. `extra`: more options for it."""
        self.shape = shape
        self._command = [str(compiler), *FLAGS, *shape.macros(), *extra]
        digest = hashlib.sha256()
        for source in sorted(SOURCES.glob("*.cu*")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        digest.update("\0".join([*self._command, compiler_version(compiler)]).encode())
        folder = library_folder() if folder is None else folder
        self.path = folder / f"step_{shape.label}_{digest.hexdigest()[:16]}.so"
        self._process: subprocess.Popen[bytes] | None = None
        # a pipe that nobody reads would stop a compiler that says much
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._made: Path | None = None
        if not self.path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            # under another name first: several processes may build the same
            handle, name = tempfile.mkstemp(suffix=".so", prefix="building_", dir=folder)
            os.close(handle)
            self._made = Path(name)
            command = [*self._command, "-o", name, str(SOURCES / "step.cu")]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.STDOUT
            )

    def ready(self, wait: bool = False) -> bool:
        """Whether the library is on disk. Raises BuildError, once and for all, if the compiler refused."""
        process = self._process
        if process is None:
            return True
        if not wait and process.poll() is None:
            return False
        process.wait()
        self._process = None
        assert self._made is not None
        if process.returncode:
            self._made.unlink(missing_ok=True)
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()
            raise BuildError(f"nvcc ended with {process.returncode}: {said[-2000:]}")
        self._made.chmod(0o755)
        self._made.replace(self.path)
        return True

    def stop(self) -> None:
        """End a compiler that runs; what it has written is removed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if self._made is not None:
                self._made.unlink(missing_ok=True)


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("tiles", "splits", "span", "chunk", "chunks", "box", "rows", "advance")),
        ("magic", ctypes.c_uint),
    ]


POINTERS = (
    "maps", "layers", "embedding", "cosines", "sines", "num_tokens", "token_ids", "positions", "span_of", "query_start",
    "rows", "block_table", "residual", "normed", "squares", "qkv", "mixed", "activated", "partial", "part_out",
    "part_norm", "logits", "epoch", "counters", "product_tickets", "unit_tickets",
)  # fmt: skip
INTEGERS = ("num_layers", "capacity", "table_stride", "least_keys")
FLOATS = ("eps", "head_eps", "scale", "embedding_scale")


class StepParams(ctypes.Structure):
    """`Params` of csrc/params.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("products", _Product * 5),
        *((name, ctypes.c_int) for name in INTEGERS),
        *((name, ctypes.c_float) for name in FLOATS),
    ]

    def cut(self, cuts: list[ProductCut]) -> None:
        """Fill in how the products are cut."""
        for index, each in enumerate(cuts):
            self.products[index] = _Product(*astuple(each))


class StepLibrary:
    """The functions of one build."""

    def __init__(self, path: Path):
        """Raises BuildError where the library cannot be loaded or was built from other sources."""
        try:
            functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from None
        self._functions: Any = functions
        functions.headrace_error.restype = ctypes.c_char_p
        functions.headrace_encode.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, *[ctypes.c_int] * 5,
        ]  # fmt: skip
        functions.headrace_launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        if functions.headrace_params_bytes() != ctypes.sizeof(StepParams):
            raise BuildError(f"{path} was built from other sources")
        self.attention_bytes: int = functions.headrace_attention_bytes()
        self.source_at: int = functions.headrace_source_at()  # shared memory before what is multiplied

    def encode(self, weight: int, rows: int, inner: int, cut: ProductCut, gated: bool) -> bytes:
        """The tensor map of the weight at address `weight`, bf16 [rows, inner], or [2 * rows, inner] if `gated`."""
        map_bytes = ctypes.create_string_buffer(128 + 64)
        aligned = ctypes.addressof(map_bytes) + 63 & ~63
        halves, tile = (2, 8) if gated else (1, 16)
        error = self._functions.headrace_encode(aligned, weight, rows, halves, inner, tile, cut.chunk, cut.box)
        if error:
            raise RuntimeError(f"no tensor map of [{rows}, {inner}] in boxes of {cut.chunk}: driver error {error}")
        return ctypes.string_at(aligned, 128)

    def prepare(self, shared_bytes: int) -> None:
        """Let launches have that much shared memory."""
        self._check(self._functions.headrace_prepare(shared_bytes))

    def launch(self, params: StepParams, grid: int, shared_bytes: int, stream: int) -> None:
        """One step in `grid` programs. Raises RuntimeError where it does not start."""
        self._check(self._functions.headrace_launch(ctypes.byref(params), grid, shared_bytes, stream))

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"the kernel of the whole step: {self._functions.headrace_error(error).decode()}")
