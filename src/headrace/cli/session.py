"""What `run` and `chat` share: streaming an answer to the terminal and saying how fast it came."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.frontend.llm import LLM
    from headrace.frontend.output import RequestOutput


@dataclass
class Answer:
    """A streamed answer and its times, in seconds from submission."""

    output: RequestOutput
    first_token: float
    total: float

    @property
    def text(self) -> str:
        return self.output.outputs[0].text

    def speed(self, llm: LLM) -> str:
        """One line: tokens, tokens per second, time to first token, and what bound the decoding."""
        from headrace.ledger.explain import conclusion

        count = sum(len(choice.token_ids) for choice in self.output.outputs)
        spent = self.total - self.first_token
        rate = f"{(count - len(self.output.outputs)) / spent:.1f} tokens/s" if spent > 0 and count > 1 else "-"
        line = (
            f"{len(self.output.prompt_token_ids)} prompt tokens, first token after {self.first_token:.2f} s, "
            f"{count} tokens at {rate}"
        )
        bound = conclusion(llm.engine.ledger) if len(llm.engine.ledger) else ""
        return f"[{line}]" + (f"\n[{bound}]" if bound else "")


def stream_answer(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Answer:
    """Generate and print as it comes. Several choices are printed one after the other, when all are done."""
    started = time.perf_counter()
    output = llm.engine.submit(prompt, params)
    first = 0.0
    try:
        while not output.finished:
            for update in llm.engine.step():
                first = first or time.perf_counter() - started
                if params.n == 1:
                    sys.stdout.write(update.text)
                    sys.stdout.flush()
    finally:
        llm.engine.abort(output)
    answer = Answer(output, first, time.perf_counter() - started)
    for choice in output.outputs:
        if params.n > 1:
            print(f"--- choice {choice.index}\n{choice.text}")
        if choice.error:
            raise ValueError(choice.error)
    if params.n == 1:
        print()
    return answer
