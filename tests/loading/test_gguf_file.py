"""L03 to L06: what a GGUF file may say, and that no file can do worse than be refused."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import F32_TENSOR, SOUND, gguf, info, pair, string, u32, u64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.loading.errors import CheckpointError
from headrace.loading.gguf_file import GGUFFile
from headrace.loading.gguf_types import TENSOR_TYPES


def opened(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return GGUFFile(path)


def test_reads_a_sound_file(tmp_path: Path) -> None:
    file = opened(tmp_path, SOUND)
    assert file.text("general.architecture") == "llama" and file.integer("n") == 7 and file.number("f") == 0.5
    assert file.strings("a.list") == ["x", "yy", "é"]
    assert file.info("w").shape == (2, 4)
    np.testing.assert_array_equal(file.read("w"), np.arange(1, 9, dtype=np.float32).reshape(2, 4))


def test_version_2_is_little_endian_too(tmp_path: Path) -> None:
    data = SOUND[:4] + u32(2) + SOUND[8:]
    assert opened(tmp_path, data).version == 2
    np.testing.assert_array_equal(opened(tmp_path, data).read("w").ravel(), np.arange(1, 9))


FAULTS = {
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(100), "byte order"),
    "version 0": (gguf(version=0), "version 0"),
    "version 99": (gguf(version=99), "version 99"),
    "magic": (gguf(magic=b"GGML"), "not a GGUF"),
    "empty": (b"", "0 bytes"),
    "key length": (gguf(num_pairs=1)[:24] + u64(0xFFFFFFFFFFFF) + bytes(8), "key 0"),
    "string length": (gguf([string("k") + u32(8) + u64(1 << 63)]), "'k'"),
    "tensor_count": (gguf([pair("n", 1)], num_tensors=1 << 40), "tensor_count"),
    "kv_count": (gguf(num_pairs=1 << 40), "kv_count"),
    "one tensor more": (SOUND[:8] + u64(2) + SOUND[16:], "m.gguf"),
    "one tensor less": (SOUND[:8] + u64(0) + SOUND[16:], "tensor_count"),
    "one key more": (gguf([pair("n", 1)], [info("w", [4, 2], 0, 0)], F32_TENSOR, num_pairs=2), "m.gguf"),
    "one key less": (gguf([pair("n", 1), pair("m", 1)], [info("w", [4, 2], 0, 0)], F32_TENSOR, num_pairs=1), "m.gguf"),
    "array of 2^61": (gguf([pair("k", u32(9) + u32(10) + u64(1 << 61))]), "'k'"),
    "strings of 2^40": (gguf([pair("k", u32(9) + u32(8) + u64(1 << 40))]), "'k'"),
    "string in array": (gguf([pair("k", u32(9) + u32(8) + u64(1) + u64(1 << 62))]), "'k'"),
    "nested": (gguf([pair("k", u32(9) + (u32(9) + u64(1)) * 10_000)]), "arrays of arrays"),
    "value type": (gguf([pair("k", u32(77) + bytes(8))]), "type 77"),
    "bool": (gguf([pair("k", u32(7) + b"\2")]), "boolean"),
    "duplicate key": (gguf([pair("k", 1), pair("k", 2)]), "'k' appears twice"),
    "duplicate tensor": (gguf([], [info("a", [8], 0, 0), info("a", [8], 0, 32)], F32_TENSOR * 2), "'a' appears twice"),
    "n_dims 0": (gguf([], [info("a", [], 0, 0), bytes(40)]), "'a' has 0 dim"),
    "n_dims 5": (gguf([], [info("a", [1] * 5, 0, 0)]), "'a' has 5 dim"),
    "n_dims 9": (gguf([], [info("a", [1] * 9, 0, 0)]), "'a' has 9 dim"),
    "n_dims 2^31": (gguf([], [info("a", [1], 0, 0, 1 << 31)]), "'a' has 2147483648 dim"),
    "dims": (gguf([], [info("a", [2**64 - 1, 2], 0, 0)]), "'a'"),
    "dim 0": (gguf([], [info("a", [4, 0], 0, 0)]), "'a'"),
    "offset 2^63": (gguf([], [info("a", [8], 0, 1 << 63)], F32_TENSOR), "'a'"),
    "offset unaligned": (gguf([], [info("a", [4], 0, 16)], F32_TENSOR), "'a'.*alignment"),
    "past the end": (gguf([], [info("a", [9], 0, 0)], F32_TENSOR), "'a'.*past the end"),
    "alignment": (gguf([pair("general.alignment", 33)]), "general.alignment"),
    "row width": (gguf([], [info("a", [8, 64], 14, 0)], bytes(840)), "'a'.*Q6_K"),
    "type id 38": (gguf([], [info("a", [32], 38, 0)], bytes(64)), "'a'.*38"),
    "type id 200": (gguf([], [info("a", [32], 200, 0)], bytes(64)), "'a'.*200"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused_fast_and_by_name(tmp_path: Path, name: str) -> None:
    data, message = FAULTS[name]
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path, data)
    assert time.perf_counter() - start < 0.5
    assert "m.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_faults_need_no_memory(tmp_path: Path) -> None:
    """In a process that may not grow by more than 100 MB."""
    for index, (data, _) in enumerate(FAULTS.values()):
        (tmp_path / f"{index}.gguf").write_bytes(data)
    script = (
        "import resource, pathlib, sys\n"
        "from headrace.loading.gguf_file import GGUFFile\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + 100_000_000\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "refused = 0\n"
        "for path in pathlib.Path(sys.argv[1]).glob('*.gguf'):\n"
        "    try: GGUFFile(path)\n"
        "    except ValueError: refused += 1\n"
        "print(refused)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == str(len(FAULTS)), result.stderr


def test_sparse_file_beyond_4_gib(tmp_path: Path) -> None:
    offset = 5 << 30
    path = tmp_path / "m.gguf"
    with open(path, "wb") as file:
        file.write(gguf([], [info("a", [8], 0, offset)]))
        file.seek(offset, 1)
        file.write(F32_TENSOR)
    np.testing.assert_array_equal(GGUFFile(path).read("a"), np.arange(1, 9))


def test_type_table_is_ggufs() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {id: (kind.name, kind.block, kind.size) for id, kind in TENSOR_TYPES.items()}
    assert {id: ours[id] for id in theirs if id in ours} == {id: theirs[id] for id in theirs if id in ours}
    assert len(set(theirs) & set(ours)) >= 30


# Types whose blocks of random bytes have scales that are numbers: everything but the scale fields may be random.
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64", "I8", "I32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantisation_is_ggufs(tmp_path: Path, name: str) -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    values = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    kind = GGMLQuantizationType[name]
    if name in ("F64", "I8", "I32"):
        stored = (values * 50).astype({"F64": np.float64, "I8": np.int8, "I32": np.int32}[name])
        expected = stored.astype(np.float32)
        stored = stored.view(np.uint8)
    else:
        stored = quantize(values, kind).view(np.uint8)
        expected = dequantize(stored, kind).astype(np.float32)
    file = opened(tmp_path, gguf([], [info("a", [64, 3], int(kind), 0)], stored.tobytes()))
    np.testing.assert_array_equal(file.read("a"), expected)


@pytest.mark.parametrize(
    "name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0"]
)
def test_block_types_are_ggufs(tmp_path: Path, name: str) -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    stored = np.random.default_rng(2).integers(
        0, 60, (2, 256 // kind.block * kind.size), np.uint8
    )  # halves stay finite
    file = opened(tmp_path, gguf([], [info("a", [256, 2], kind.id, 0)], stored.tobytes()))
    np.testing.assert_array_equal(file.read("a"), dequantize(stored, GGMLQuantizationType[name]))


@pytest.mark.parametrize("scale", [0x7E00, 0x7C00, 0xFC00])
def test_scales_that_are_not_finite_are_found(tmp_path: Path, scale: int) -> None:
    block = struct.pack("<e", 1.0) + bytes(range(32))
    data = block * 7 + struct.pack("<H", scale) + bytes(range(1, 33))
    file = opened(tmp_path, gguf([], [info("blk.0.attn_q.weight", [32, 8], 8, 0)], data))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight.*finite"):
        file.read("blk.0.attn_q.weight")


def test_metadata_of_another_type_is_named(tmp_path: Path) -> None:
    file = opened(tmp_path, SOUND)
    for call in (
        lambda: file.integer("general.architecture"),
        lambda: file.text("n"),
        lambda: file.number("a.list"),
        lambda: file.flag("n"),
        lambda: file.strings("n"),
        lambda: file.numbers("a.list"),
        lambda: file.strings("absent"),
    ):
        with pytest.raises(CheckpointError, match="key '"):
            call()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=6), cut=st.integers(0, 40)
)
def test_any_mutation_reads_or_is_refused(tmp_path: Path, edits: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(SOUND)
    for position, byte in edits:
        data[position] = byte
    try:
        file = opened(tmp_path, bytes(data[: len(data) - cut]))
        for name in file.tensors:
            file.read(name)
        for key in file.metadata:
            file.strings(key)
    except CheckpointError:
        pass


def test_default_model_header_is_fast(default_model_path: Path) -> None:
    start = time.perf_counter()
    file = GGUFFile(default_model_path)
    assert time.perf_counter() - start < 0.25
    assert len(file.tensors) == 272 and len(file.strings("tokenizer.ggml.tokens")) == 49152
