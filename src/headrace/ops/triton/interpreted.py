"""Triton 3.6's interpreter on numpy 2.4 and newer, where int() of an array of one element is an error."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def repair() -> None:
    """Let tensors of one element serve as bounds of loops again. Only where TRITON_INTERPRET=1, that is in tests."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
