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
    streamed: bool = True  # False: all tokens came at once, so there is no rate of decoding to tell

    @property
    def text(self) -> str:
        return self.output.outputs[0].text

    def speed(self, llm: LLM) -> str:
        """One line: tokens, tokens per second, time to first token, and what bound the decoding."""
        from headrace.ledger.explain import conclusion

        count = sum(len(choice.token_ids) for choice in self.output.outputs)
        spent = self.total - self.first_token
        rate = f"{(count - len(self.output.outputs)) / spent:.1f} tokens/s" if spent > 0 and count > 1 else "-"
        line = f"{len(self.output.prompt_token_ids)} prompt tokens, "
        if self.streamed:
            line += f"first token after {self.first_token:.2f} s, {count} tokens at {rate}"
        else:
            line += f"{count} tokens in {self.total:.2f} s, {count / max(self.total, 1e-9):.1f} tokens/s over all"
        bound = conclusion(llm.engine.ledger) if len(llm.engine.ledger) else ""
        return f"[{line}]" + (f"\n[{bound}]" if bound else "")


def stream_answer(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Answer:
    """Generate and print as it comes. Several choices are printed one after the other, when all are done."""
    started = time.perf_counter()
    output = llm.engine.submit(prompt, params)
    first, bursts = 0.0, 0
    try:
        while not output.finished:
            updates = llm.engine.step()
            bursts += bool(updates)
            for update in updates:
                first = first or time.perf_counter() - started
                if params.n == 1:
                    sys.stdout.write(update.text)
                    sys.stdout.flush()
    finally:
        llm.engine.abort(output)
    answer = Answer(output, first, time.perf_counter() - started, streamed=bursts > 1)
    for choice in output.outputs:
        if params.n > 1:
            print(f"--- choice {choice.index}\n{choice.text}")
        if choice.error:
            raise ValueError(choice.error)
    if params.n == 1:
        print()
    return answer
