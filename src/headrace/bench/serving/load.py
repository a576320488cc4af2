"""Conversations against a server: in a closed loop of so many clients, or as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.bench.serving.client import Answer, Client, ServerError
from headrace.bench.serving.workload import Arrivals, Conversation, TokensPerWord, arrival_times

_FEW, _MANY = 40, 240  # words of the prompts that tell how a server counts
MOST_OPEN = 2000  # requests at once; more would be the client's limits measured


@dataclass(slots=True)
class Run:
    """The answers of one run, in the order they ended."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0  # from the first request to the last end
    late: float = 0.0  # most seconds that a request was sent after its time: above a few ms, the client is the limit

    @property
    def whole(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.error]

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """When requests come."""

    arrivals: Arrivals = "closed"
    clients: int = 8  # closed: so many at once
    rate: float = 4.0  # otherwise: conversations a second
    burstiness: float = 0.25
    seed: int = 0

    @property
    def label(self) -> str:
        if self.arrivals == "closed":
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return f"{self.arrivals} {self.rate:g}/s"


async def measure_scale(client: Client) -> TokensPerWord:
    """How the server counts tokens; ServerError if it does not answer."""
    draws = []
    for count in (_FEW, _MANY):
        words = " ".join(["river", "stone", "wheel", "garden"] * (count // 4))
        answer = await client.ask([{"role": "user", "content": words}], 1)
        if answer.error:
            raise ServerError(f"the server does not answer a short request: {answer.error}")
        if answer.prompt_tokens is None:  # it does not count: a word is about a token in every tokenizer
            return TokensPerWord(1.0, 0.0)
        draws.append(answer.prompt_tokens)
    slope = (draws[1] - draws[0]) / (_MANY - _FEW)
    return TokensPerWord(max(slope, 0.1), max(0.0, draws[0] - slope * _FEW))


async def run(client: Client, conversations: Sequence[Conversation], pattern: Pattern) -> Run:
    """Every conversation, to its end or its first error."""
    found = Run()
    began = time.perf_counter()

    async def talk(conversation: Conversation) -> None:
        messages: list[dict[str, str]] = []
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn.text})
            answer = await client.ask(messages, turn.max_tokens)
            found.answers.append(answer)
            if answer.error:
                return
            messages.append({"role": "assistant", "content": answer.text})

    if pattern.arrivals == "closed":
        waiting = iter(conversations)

        async def one() -> None:
            for conversation in waiting:
                await talk(conversation)

        await asyncio.gather(*(one() for _ in range(min(pattern.clients, len(conversations)))))
    else:
        open_requests = asyncio.Semaphore(MOST_OPEN)

        async def bounded(conversation: Conversation) -> None:
            async with open_requests:
                await talk(conversation)

        tasks = []
        times = arrival_times(pattern.arrivals, pattern.rate, pattern.burstiness, pattern.seed)
        for conversation, due in zip(conversations, times, strict=False):
            wait = began + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            found.late = max(found.late, time.perf_counter() - began - due)
            tasks.append(asyncio.create_task(bounded(conversation)))
        await asyncio.gather(*tasks)
    found.seconds = time.perf_counter() - began
    return found
