"""Builds the native CPU library; everything else is in pyproject.toml.

It is a plain shared library, not a Python extension: one compiler call a file, each code path with its own instruction
flags (the library chooses among them when it is loaded), no Python headers. Where there is no compiler the
installation still succeeds and Headrace runs on numpy, which it says at the start.

HEADRACE_CXXFLAGS adds flags (sanitizers, for one), CXX names the compiler.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCES = Path("src/headrace/ops/native/csrc")
LIBRARY = "libheadrace.so"
HEADS = Path("models")  # draft heads for models that Headrace knows
COMMON = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread",
    "-ffp-contract=off",  # a multiply-add is fused where the code says so and nowhere else
    "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
]  # fmt: skip
PATHS = {  # flags of the files that are compiled for more than the baseline, on x86-64
    "path_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "path_avx512": [
        "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c",
        "-mprefer-vector-width=512",
        "-fno-schedule-insns2",  # GCC 12 would undo the order in which planes.h has its products: slower
    ],
    "path_amx": [
        "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16", "-mavx512fp16",
        "-mfma", "-mf16c",
        "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512",
    ],
    "path_amx_emulated": [
        "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512",
    ],
}  # fmt: skip


def compiler() -> list[str] | None:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    return None


def _takes(command: list[str], flags: list[str]) -> bool:
    """Whether the compiler knows `flags`."""
    asked = [*command, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(asked, capture_output=True).returncode == 0


def build_library(target: Path, work: Path, flags: tuple[str, ...] = ()) -> None:
    """Compile SOURCES into `target`; subprocess.CalledProcessError or OSError if that fails."""
    found = compiler()
    if found is None:
        raise FileNotFoundError("no C++ compiler (g++ or clang++) was found")
    extra = [*shlex.split(os.environ.get("HEADRACE_CXXFLAGS", "")), *flags]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    work.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)

    def compile_file(source: Path) -> str:
        result = work / f"{source.stem}.o"
        own = PATHS.get(source.stem, []) if x86 else []
        if own and not _takes(found, own):
            own = []  # a compiler that does not know them: the path is left out, and `headrace doctor` says so
        command = [*found, *COMMON, *own, *extra, "-c", str(source), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True)
        sys.stderr.write(done.stderr)
        done.check_returncode()
        return str(result)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_file, sorted(SOURCES.glob("*.cpp"))))
    # under another name first: a process that has the old library mapped keeps it
    made = target.with_suffix(".new")
    subprocess.run([*found, "-shared", "-pthread", *extra, *objects, "-lm", "-o", str(made)], check=True)
    made.replace(target)


class BuildNative(build_ext):
    """Makes LIBRARY instead of a Python extension, and carries on without it if that fails."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            build_library(target, Path(self.build_temp))
        except (OSError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"headrace: the native CPU kernels were not built ({error}); numpy will do their work\n")

    def copy_extensions_to_source(self) -> None:
        build = self.get_finalized_command("build_py")
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            package = build.get_package_dir(".".join(ext.name.split(".")[:-1]))
            if built.exists():
                self.copy_file(str(built), os.path.join(package, LIBRARY))

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]


class BuildPackage(build_py):
    """The package with the draft heads of models/ as its folder heads/; loading/released.py finds them at either place,
    so an editable installation needs no copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._heads().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._heads().values()]

    def _heads(self) -> dict[str, str]:
        """Where each file comes from, and goes to."""
        folder = Path(self.build_lib) / "headrace" / "heads"
        return {str(each): str(folder / each.relative_to(HEADS)) for each in sorted(HEADS.glob("*/*"))}


class PlatformWheel(bdist_wheel):
    """A wheel for any Python on this platform: the library knows nothing of Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        # the sources are named so that they are part of a source distribution
        ext_modules=[Extension("headrace.ops.native.library_", [str(path) for path in sorted(SOURCES.glob("*.cpp"))])],
        cmdclass={"build_ext": BuildNative, "build_py": BuildPackage, "bdist_wheel": PlatformWheel},
    )
