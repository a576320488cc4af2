"""The house's rules: who may import whom, how long a file may be, what a CPU user must not need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "headrace"
FILES = sorted(SOURCE.rglob("*.py"))

# package -> what it may import of headrace, besides itself
LAYERS = {
    "config": set(),
    "env": set(),
    "sampling.params": {"config"},
    "core": {"sampling.params", "env"},
    "ops": {"env"},
    "device": set(),
    "models.spec": set(),
    "layers": {"ops", "models.spec", "attention.base", "quant"},
    "quant": {"ops", "layers.weights"},
    "attention": {"ops", "core", "worker.batch"},
    "models": {"ops", "layers", "attention.base", "quant"},
    "sampling": {"ops", "core", "config"},
    "spec": {"ops", "core", "sampling"},
    "spec.eagle": {
        "ops", "core", "attention.base", "models.draft_heads", "worker.batch", "worker.kv_cache", "worker.recorded",
        "worker.table",
    },
    "spec.parallel_draft": {"ops", "core", "attention.base", "models.blocks"},
    "spec.draft_runner": {
        "ops", "core", "attention.base", "models.blocks", "worker.batch", "worker.kv_cache", "worker.recorded",
        "worker.table",
    },
    "loading": {
        "models.spec", "layers.weights", "ops.native", "frontend.tokenizer", "frontend.gguf_tokenizer",
        "models.registry",
    },
    "worker": {"env", "ops", "core", "models", "layers", "attention", "sampling", "spec", "device", "quant", "config"},
    "executor": {"worker", "core"},
    "autopilot": {"core", "ledger"},
    "ledger": {"core", "models.spec", "device"},
    "resolve": {"config", "core", "device", "models.spec", "ops.kv_format"},
    "frontend": {
        "autopilot", "config", "core", "device", "executor", "ledger", "loading", "models.spec", "resolve",
        "sampling.grammar", "sampling.params", "worker",
    },
    "server": {"config", "core", "frontend", "loading", "models.spec", "sampling.params"},
    "train": {
        "config", "device", "frontend", "layers.weights", "loading", "models", "quant", "sampling.params",
    },
    "bench.tiles": {"ops", "models.spec"},
    "bench.attention": {"ops", "attention", "device", "loading"},
    "bench": {"frontend", "sampling.params", "device", "ledger", "loading"},
    "doctor": {"attention", "device", "frontend", "ledger", "loading", "ops", "sampling.params"},
    "cli": {
        "env", "bench", "doctor", "server", "train", "config", "frontend", "ledger", "loading", "models.registry",
        "sampling.params", "core",
    },
}  # fmt: skip


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def _matches(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def _imports(path: Path) -> set[str]:
    """Modules of headrace that a file imports, at whatever depth in it, type checking left out."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headrace."):
            found.add(node.module.removeprefix("headrace."))
        elif isinstance(node, ast.ImportFrom) and node.module == "headrace":
            found.update(alias.name for alias in node.names if not alias.name.startswith("__"))
        elif isinstance(node, ast.Import):
            found.update(a.name.removeprefix("headrace.") for a in node.names if a.name.startswith("headrace."))
    return found


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_stay_within_the_layers(path):
    module = _module(path)
    if module == "__init__" or module.endswith("__main__"):
        return
    layer = max((name for name in LAYERS if _matches(module, {name})), key=len, default=None)
    assert layer is not None, f"{module} belongs to no layer of this test"
    package = module.split(".")[0]
    strangers = {name for name in _imports(path) if not _matches(name, LAYERS[layer] | {layer, package})}
    assert not strangers, f"{module} ({layer}) must not import {sorted(strangers)}"


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_files_stay_small(path):
    budget = {"worker.runner": 300}.get(_module(path), 150 if _is_model(path) else 500)
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= budget, f"{path.name} has {lines} lines, {budget} are allowed"


def _is_model(path: Path) -> bool:
    return path.parent.name == "models" and path.stem not in ("blocks", "registry", "spec", "__init__")


def test_the_core_imports_no_array_library_but_numpy():
    for path in (SOURCE / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"torch", "array_api_compat", "jax", "scipy"}, path


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("headrace.frontend.llm", {"torch", "transformers", "array_api_compat", "huggingface_hub", "jinja2"}),
        ("headrace.cli.main", {"numpy", "torch", "tokenizers", "jinja2", "gguf"}),
    ],
)
def test_imports_stay_light(module, banned):
    code = f"import sys, {module}; print(' '.join(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not banned & set(loaded)
