"""Whole models: logits against the references for every format of a GGUF file, bits in every company, the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.attention.native import NativeAttention
from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.errors import CheckpointError
from headrace.models.registry import build_model
from headrace.ops.native.library import library, open_library
from headrace.ops.registry import using
from headrace.quant.packed import Packed
from models.harness import Stepper
from native.blocks import FORMATS, random_rows
from tiny import write_tiny_llama

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 256, 512, 4, 2, 64, 96, 2


def write_model(path: Path, formats: dict[str, str], *, tied: bool = False, seed: int = 0) -> Path:
    """A random llama as a GGUF file. `formats` gives a tensor type by a part of the name; "" is the others'."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)

    def add(name: str, rows: int, columns: int, std: float) -> None:
        format = next((kind for part, kind in formats.items() if part and part in name), formats[""])
        kind = gguf.GGMLQuantizationType[format]
        writer.add_tensor(name, random_rows(rng, format, rows, columns, std), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, 1 + 0.1 * rng.standard_normal(HIDDEN).astype(np.float32))

    add("token_embd.weight", VOCAB, HIDDEN, 1.0)
    if not tied:
        add("output.weight", VOCAB, HIDDEN, 0.1)
    norm("output_norm.weight")
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        norm(prefix + "attn_norm.weight")
        norm(prefix + "ffn_norm.weight")
        add(prefix + "attn_q.weight", HEADS * DIM, HIDDEN, 0.1)
        add(prefix + "attn_k.weight", KV_HEADS * DIM, HIDDEN, 0.1)
        add(prefix + "attn_v.weight", KV_HEADS * DIM, HIDDEN, 0.05)
        add(prefix + "attn_output.weight", HIDDEN, HEADS * DIM, 0.05)
        add(prefix + "ffn_gate.weight", INNER, HIDDEN, 0.05)
        add(prefix + "ffn_up.weight", INNER, HIDDEN, 0.05)
        add(prefix + "ffn_down.weight", HIDDEN, INNER, 0.05)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounding(path: str) -> float:
    """How far the default mode's logits may be from float32's, as a share of the largest: 16-bit integers keep 15 bits
    of an input, bfloat16 keeps 8, and of weights too."""
    return 0.1 if path.startswith("amx") else 2e-3


CASES = {format: {"": format} for format in FORMATS}
CASES["mixed"] = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
CASES["others"] = {"": "IQ4_NL", "ffn": "Q4_0"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_every_format(path: str, tmp_path: Path, case: str, tied: bool) -> None:
    file = write_model(tmp_path / "m.gguf", CASES[case], tied=tied)
    checkpoint = open_checkpoint(file)
    ids = np.random.default_rng(1).integers(0, VOCAB, 90)
    with using():
        reference = build_model(checkpoint.spec, WeightSource(checkpoint))
        expected = Stepper(reference, 1, 128).step({0: ids})[0]
    model = build_model(checkpoint.spec, WeightSource(checkpoint), Packed())
    assert model.num_parameters == reference.num_parameters
    stepper = Stepper(model, 3, 128)
    stepper.backend = NativeAttention(16)
    whole = stepper.step({0: ids})[0]
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    pieces = stepper.chunks(1, ids, [40, 1, 3, 20])
    np.testing.assert_array_equal(pieces, whole)

    stepper.model = build_model(checkpoint.spec, WeightSource(checkpoint), Packed(mode="default"))
    rounded = stepper.step({2: ids})[2]
    np.testing.assert_allclose(rounded, expected, rtol=0, atol=rounding(path) * np.abs(expected).max())
    stepper.lengths[0] = 0
    np.testing.assert_array_equal(stepper.chunks(0, ids, [50, 1, 3, 20]), rounded)


def test_damaged_scales_name_file_and_tensor(path: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", {"": "Q4_1"})
    checkpoint = open_checkpoint(file)
    info = checkpoint.file.info("blk.1.ffn_up.weight")
    data = bytearray(file.read_bytes())
    data[info.offset : info.offset + 2] = b"\x00\x7c"
    file.write_bytes(data)
    checkpoint = open_checkpoint(file)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.ffn_up\.weight' \(Q4_1\) holds values"):
        build_model(checkpoint.spec, WeightSource(checkpoint), Packed())


SCRIPT = """
import sys
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1], max_num_batched_tokens=int(sys.argv[2]), max_num_seqs=int(sys.argv[2]))
params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
for output in llm.generate(["once upon", "a time there was", "x"], params):
    print(output.outputs[0].token_ids)
print(llm.engine._worker.attention_backend, file=sys.stderr)
"""


def run_engine(folder: Path, budget: int, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(budget)],
        env={**os.environ, "PYTHONPATH": "src", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_engine_on_every_path_and_without_it(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    expected, said = run_engine(folder, 64, HEADRACE_NATIVE="0")
    assert said.split() == ["reference"]
    for path in ("", "portable", "avx2", "avx512", "amx", "amx-emulated"):
        if path and path not in library_paths():
            continue
        found, said = run_engine(folder, 4 if path else 64, HEADRACE_NATIVE_PATH=path)
        assert found == expected
        assert said.split() == ["native"]
    found, said = run_engine(folder, 64, HEADRACE_NATIVE_PATH="nonsense")
    assert found == expected
    assert "HEADRACE_NATIVE_PATH=nonsense" in said and said.count("running on numpy") == 1


def library_paths() -> list[str]:
    from headrace.ops.native.library import available_paths

    return available_paths()


def test_a_library_that_is_not_one(tmp_path: Path) -> None:
    from headrace.ops.native.library import NativeError

    (tmp_path / "broken.so").write_bytes(b"nothing")
    with pytest.raises(NativeError, match="cannot be loaded"):
        open_library(tmp_path / "broken.so")


@pytest.mark.slow
def test_default_model(path: str, default_model_path: Path) -> None:
    checkpoint = open_checkpoint(default_model_path)
    ids = np.random.default_rng(1).integers(0, checkpoint.spec.vocab_size, 150)
    with using():
        reference = build_model(checkpoint.spec, WeightSource(checkpoint))
        expected = Stepper(reference, 1, 160).step({0: ids})[0]
        del reference
    model = build_model(checkpoint.spec, WeightSource(checkpoint), Packed())
    stepper = Stepper(model, 2, 160)
    stepper.backend = NativeAttention(16)
    whole = stepper.step({0: ids})[0]
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    library().set_num_threads(2)
    np.testing.assert_array_equal(stepper.chunks(1, ids, [100, 7, 30]), whole)

    stepper.model = build_model(checkpoint.spec, WeightSource(checkpoint), Packed(mode="default"))
    stepper.lengths = [0, 0]
    rounded = stepper.step({0: ids})[0]
    np.testing.assert_allclose(rounded, expected, rtol=0, atol=rounding(path) / 2 * np.abs(expected).max())
    np.testing.assert_array_equal(stepper.chunks(1, ids, [100, 7, 30]), rounded)


@pytest.mark.parametrize("layout", ["one by one", "merged", "stacked"])
@pytest.mark.parametrize("format", ["Q4_0", "Q6_K", "BF16"])
def test_experts_stay_packed_and_agree_with_the_reference(path: str, layout: str, format: str) -> None:
    from headrace import ops
    from headrace.layers.moe import ExpertLayout, ExpertNames, MixtureOfExperts
    from headrace.models.spec import ModelSpec, MoESpec
    from headrace.ops.native.packed import StoredTensor
    from headrace.quant.unquantized import Unquantized
    from models.harness import DictCheckpoint
    from native.blocks import dequantized

    experts, hidden, inner = 4, 512, 256
    rng = np.random.default_rng(0)
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    rows = {name: random_rows(rng, format, experts * n, k) for name, (n, k) in sizes.items()}
    floats = {name: dequantized(format, rows[name]).reshape(experts, *sizes[name]) for name in sizes}
    stored = {"m.gate.weight": rng.standard_normal((experts, hidden), np.float32)}
    raw = {}
    if layout == "merged":
        stored["m.experts.gate_up_proj"] = np.concatenate([floats["gate_proj"], floats["up_proj"]], 1)
        stored["m.experts.down_proj"] = floats["down_proj"]
    for name, (n, _) in {} if layout == "merged" else sizes.items():
        if layout == "stacked":
            stored[f"m.experts.{name}.weight"], raw[f"m.experts.{name}.weight"] = floats[name], rows[name]
        for e in range(experts) if layout == "one by one" else ():
            stored[f"m.experts.{e}.{name}.weight"] = floats[name][e]
            raw[f"m.experts.{e}.{name}.weight"] = rows[name][e * n : (e + 1) * n]

    class Stored(DictCheckpoint):
        def read_packed(self, name: str) -> StoredTensor | None:
            return StoredTensor(format, raw[name], None) if name in raw else None

    moe = MoESpec(experts, 2, inner)
    spec = ModelSpec("mixtral", 50, hidden, 32, 1, 2, 2, 4, 1e-5, 64, moe=moe)
    made = {}
    for scheme in (Packed(), Packed(mode="default"), Unquantized()):
        source = WeightSource(Stored(stored) if isinstance(scheme, Packed) else DictCheckpoint(stored))
        block = MixtureOfExperts(spec, source, "m", scheme, ExpertNames(), ExpertLayout.OUT_IN)
        source.finish()
        made[scheme] = block
    exact, default, reference = made.values()
    assert exact.num_parameters == reference.num_parameters
    if layout != "merged":
        assert exact.experts.down[1].segments[0].format == format
        assert exact.weight_bytes < 0.6 * reference.weight_bytes
    x = rng.standard_normal((23, hidden), np.float32)
    scores = reference.router(x)
    with using():
        expected = ops.moe.reference(x, scores, reference.experts, reference.routing)
    scale = np.abs(expected).max()
    found = ops.moe(x, scores, exact.experts, exact.routing)
    assert np.abs(found - expected).max() < 1e-5 * scale
    whole = ops.moe(x, scores, default.experts, default.routing)
    assert np.abs(whole - expected).max() < rounding(path) * scale
    for token in range(0, 23, 5):
        np.testing.assert_array_equal(
            ops.moe(x[token : token + 1], scores[token : token + 1], default.experts, default.routing)[0], whole[token]
        )
