"""How much prompt a step takes beside its decodes, and whether another request may join. The scheduler asks once its
decodes are planned; a policy answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.core.plan_builder import PlanBuilder
from headrace.core.request import Request


class Pacing(Protocol):
    """Answers must let every request make progress: `prompt_tokens` is at least 1."""

    def prompt_tokens(self, decodes: PlanBuilder, budget: int, prompt: Request) -> tuple[int, str]:
        """Prompt tokens that the step may run, 1 to `budget`, and why not all of it ("": it is). `decodes` is the plan
        so far; `prompt` is the request whose turn it is."""
        ...

    def holds_back(self, running: Sequence[Request], entering: Request) -> str:
        """Why `entering` should not be admitted beside `running` yet; "": it may. Asked only while some run."""
        ...

    def backlog(self, prompts: Iterable[Request]) -> float:
        """Predicted seconds until the prompts of these requests have been run."""
        ...


class NoPacing:
    """As much as the budget holds, and everybody may join."""

    def prompt_tokens(self, decodes: PlanBuilder, budget: int, prompt: Request) -> tuple[int, str]:
        return budget, ""

    def holds_back(self, running: Sequence[Request], entering: Request) -> str:
        return ""

    def backlog(self, prompts: Iterable[Request]) -> float:
        return 0.0
