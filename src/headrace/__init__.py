"""Headrace: an LLM inference engine that measures what bounds each step, and says so.

    from headrace import LLM, SamplingParams
    llm = LLM()
    (output,) = llm.generate("The three primary colours are", SamplingParams(temperature=0, max_tokens=20))
    print(output.outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM
    from headrace.frontend.llm import LLM
    from headrace.sampling.params import SamplingParams


def __getattr__(name: str) -> Any:  # importing the package costs nothing until a name is used
    if name == "LLM":
        from headrace.frontend.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from headrace.frontend.async_llm import AsyncLLM

        return AsyncLLM
    if name == "SamplingParams":
        from headrace.sampling.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
