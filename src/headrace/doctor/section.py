"""A section of the report. A device adds one: a function that is told whether to measure and returns
a Section."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Section:
    """Findings under a title, as (name, text) in order; `problems` are sentences that say what would help."""

    title: str
    findings: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, text: object) -> None:
        self.findings.append((name, str(text)))

    def lines(self) -> list[str]:
        """As text."""
        width = max((len(name) for name, _ in self.findings), default=0)
        found = [f"  {name:{width}}  {text}" for name, text in self.findings]
        return [self.title, *found, *(f"  ! {problem}" for problem in self.problems)]
