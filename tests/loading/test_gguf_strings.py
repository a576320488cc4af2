"""Strings of a GGUF file: the native library reads what plain Python reads."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loading import gguf_strings


def mapped(strings: list[bytes], before: int = 3, after: bytes = b"rest") -> mmap.mmap:
    data = b"x" * before + b"".join(struct.pack("<Q", len(s)) + s for s in strings) + after
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


def in_python(call, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_strings, "available", lambda: False)
        return call(*arguments)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=9), st.text(max_size=5).map(str.encode)), max_size=20))
def test_both_read_the_same(strings: list[bytes]) -> None:
    memory = mapped(strings)
    arguments = (memory, 3, len(strings))
    assert gguf_strings.skip(*arguments) == in_python(gguf_strings.skip, *arguments) == len(memory) - 4
    found = gguf_strings.read(*arguments)
    assert found == in_python(gguf_strings.read, *arguments) == [s.decode("utf-8", "replace") for s in strings]


@pytest.mark.parametrize("length", [6, 2**31, 2**63, 2**64 - 1])
def test_a_string_past_the_end(length: int) -> None:
    memory = mapped([b"ab"], after=struct.pack("<Q", length) + b"12345")
    for call in (gguf_strings.skip, lambda *arguments: in_python(gguf_strings.skip, *arguments)):
        with pytest.raises((struct.error, OverflowError)):
            call(memory, 3, 2)
        with pytest.raises((struct.error, OverflowError)):
            call(memory, 3, 3)


def test_released_tensors_can_be_read_again(tmp_path: Path) -> None:
    from headrace.loading.gguf_file import GGUFFile
    from native.test_native_model import write_model

    file = GGUFFile(write_model(tmp_path / "m.gguf", {"": "Q4_1"}))
    for name in file.tensors:
        before = file.raw(name).copy()
        file.release(name)
        assert (file.raw(name) == before).all()
