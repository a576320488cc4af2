"""Safetensors folders: dtypes, shards, and files that lie. Whatever the bytes, only CheckpointError comes out."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headrace.loading.errors import CheckpointError
from headrace.loading.safetensors_file import INDEX_NAME, SINGLE_NAME, SafetensorsFolder

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.linspace(-2, 2, 8).astype(np.float16),
    "c.weight": np.arange(6, dtype=np.int8).reshape(2, 3),
}


def raw(header: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / SINGLE_NAME
    save_file(TENSORS, path)
    return path.read_bytes()


def read_all(folder):
    found = SafetensorsFolder(folder)
    return {name: found.read(name) for name in found.names()}


def test_tensors_come_as_float32(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE_NAME)
    values = read_all(tmp_path)
    for name, tensor in TENSORS.items():
        assert values[name].dtype == np.float32 and values[name].shape == tensor.shape
        np.testing.assert_array_equal(values[name], tensor.astype(np.float32))


def test_bfloat16(tmp_path):
    bits = np.array([0x3F80, 0xC000, 0x0001, 0x7F80], np.uint16)  # 1, -2, a denormal, inf
    (tmp_path / SINGLE_NAME).write_bytes(
        raw({"x": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}, bits.tobytes())
    )
    np.testing.assert_array_equal(read_all(tmp_path)["x"], (bits.astype(np.uint32) << 16).view(np.float32))


LIES = {
    "empty": b"",
    "short": b"\x08\x00",
    "header longer than the file": raw(b"{}", length=2**40),
    "header length wraps": raw(b"{}", length=2**64 - 1),
    "not JSON": raw(b"{nonsense"),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "a list": raw(b"[]"),
    "past the end": raw({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(8)),
    "backwards": raw({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
    "negative": raw({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
    "a huge shape": raw({"x": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}, bytes(4)),
    "a shape that does not fit": raw({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}, bytes(4)),
    "overlap": raw(
        {
            "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
        bytes(8),
    ),
    "unknown dtype": raw({"x": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "no offsets": raw({"x": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "deep": raw(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused(tmp_path, name):
    (tmp_path / SINGLE_NAME).write_bytes(LIES[name])
    with pytest.raises(CheckpointError, match=SINGLE_NAME):
        read_all(tmp_path)


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6), cut=st.floats(0, 1))
def test_mutations_never_do_worse_than_an_error(sound, tmp_path_factory, changes, cut):
    data = bytearray(sound)
    for where, value in changes:
        data[int(where * (len(data) - 1))] = value
    if cut < 0.3:
        del data[int(cut / 0.3 * len(data)) :]
    folder = tmp_path_factory.mktemp("mutated")
    (folder / SINGLE_NAME).write_bytes(data)
    try:
        values = read_all(folder)
    except CheckpointError:
        return
    assert all(value.dtype == np.float32 for value in values.values())


def test_shards(tmp_path):
    names = list(TENSORS)
    save_file({names[0]: TENSORS[names[0]]}, tmp_path / "one.safetensors")
    save_file({name: TENSORS[name] for name in names[1:]}, tmp_path / "two.safetensors")
    weight_map = {name: "one.safetensors" if name == names[0] else "two.safetensors" for name in names}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert set(read_all(tmp_path)) == set(TENSORS)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: two\.safetensors"):
        read_all(tmp_path)


@pytest.mark.parametrize("where", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "one.bin", ""])
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, where):
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": where}}))
    with pytest.raises(CheckpointError, match="refused"):
        read_all(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{" * 5000])
def test_a_damaged_index_is_refused(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        read_all(tmp_path)
