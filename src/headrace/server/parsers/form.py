"""AnswerForm: how a model's answers are written, read off its chat template; what a request's answer is parsed with and
held to."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.frontend.tokenizer import Tokenizer
from headrace.sampling.params import SamplingParams
from headrace.server.errors import bad_request
from headrace.server.parsers.base import AnswerParser, PlainParser, ToolForm
from headrace.server.parsers.harmony import MESSAGE, Harmony
from headrace.server.parsers.hermes import Hermes
from headrace.server.parsers.lark import Lark, Tags, answer
from headrace.server.parsers.llama import Llama
from headrace.server.parsers.mistral import Mistral
from headrace.server.parsers.thinking import Beginning, Thinking, ThinkingParser
from headrace.server.parsers.tools import Tools


@dataclass(frozen=True)
class Plan:
    """How the answers to one prompt are read."""

    form: AnswerForm
    tools: Tools | None
    beginning: Beginning
    begun: str  # harmony: the message that the prompt left unfinished
    hidden: frozenset[str]  # tags that are not shown

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self.tools is None and not self.form.thinks

    @property
    def thinks(self) -> bool:
        return self.form.thinks

    @property
    def begun_text(self) -> bool:
        """Harmony: the prompt ends inside the text of a message."""
        return MESSAGE in self.begun

    def parser(self) -> AnswerParser:
        """For one choice."""
        form = self.form
        if form.harmony is not None:
            return form.harmony.parser(self.tools, self.hidden, self.begun)
        inner: AnswerParser = PlainParser()
        if self.tools is not None and form.tools is not None:
            inner = form.tools.parser(self.tools, self.hidden)
        if form.thinking is None:
            return inner
        return ThinkingParser(form.thinking, self.beginning, inner)


class AnswerForm:
    """Of one model."""

    def __init__(self, source: str, tokenizer: Tokenizer):
        """`source`: of the chat templates, "" for none."""
        self._tags = Tags(tokenizer.token_id)
        self.tools: ToolForm | None = None
        self.harmony: Harmony | None = None
        if Harmony.matches(source):
            self.tools = self.harmony = Harmony()
        elif Mistral.matches(source):
            self.tools = Mistral(source)
        elif Hermes.matches(source):
            self.tools = Hermes()
        elif Llama.matches(source):
            self.tools = Llama(source)
        self.thinking = Thinking.of(source) if self.harmony is None else None
        special = tokenizer.special_ids
        names: list[str] = list(self.tools.tags) if self.tools is not None else []
        thought = [self.thinking.opening, self.thinking.closing] if self.thinking is not None else []
        self._tool_ids = _ids(names, tokenizer) & special
        self._think_ids = _ids(thought, tokenizer) & special
        self._stop_ids = _ids(self.tools.stops if self.tools is not None else (), tokenizer)
        self._special_tags = frozenset(tag for tag in names if tokenizer.token_id(tag) in special)

    @property
    def thinks(self) -> bool:
        """Whether answers may hold reasoning."""
        return self.thinking is not None or self.harmony is not None

    def kept_ids(self, tools: Tools | None) -> frozenset[int]:
        """Special tokens that a parser must see in the text."""
        return (self._tool_ids if tools is not None or self.harmony is not None else frozenset()) | self._think_ids

    def plan(self, tools: Tools | None, prompt: str, continued: bool, skip_special: bool) -> Plan:
        """For a rendered chat; `continued`: its last message is to be gone on with."""
        beginning, begun = Beginning.ANSWER, ""
        if self.thinking is not None:
            beginning = self.thinking.beginning(prompt, continued)
        if self.harmony is not None:
            begun = self.harmony.begun(prompt)
        hidden = self._special_tags if skip_special else frozenset()
        return Plan(self, tools, beginning, begun, hidden)

    def params(self, params: SamplingParams, plan: Plan) -> SamplingParams:
        """With the grammar of the whole answer, and with what ends one. ApiError if there is no such grammar."""
        tools, stops = plan.tools, params.stop_token_ids
        if (tools is not None or self.harmony is not None) and not params.ignore_eos:
            stops = tuple(sorted({*stops, *self._stop_ids}))
        try:
            lark = self._lark(params, plan)
            grammar = params.grammar if lark is None else lark.grammar()
            if grammar is params.grammar and stops == params.stop_token_ids:
                return params
            return params.with_(grammar=grammar, stop_token_ids=stops)
        except ValueError as error:
            param = "tools" if tools is not None else "response_format"
            raise bad_request(f"the form of the answer cannot be enforced: {error}", param) from None

    def _lark(self, params: SamplingParams, plan: Plan) -> Lark | None:
        """None where the request's own grammar, if any, will do."""
        tools, tags = plan.tools, self._tags
        rest: Lark | None = None
        if params.grammar is not None:
            rest = answer(params.grammar)
            if self.harmony is not None and not plan.begun_text:
                rest = self.harmony.final(tags, rest)
        if tools is not None and self.tools is not None:
            if tools.forced:
                rest = self.tools.calls(tools, tags)
            elif rest is not None:
                rest = self.tools.calls_or(rest, tools, tags)
            elif tools.strict:
                rest = self.tools.text_with_calls(tools, tags)
        elif not self.thinks:
            return None
        if rest is None:
            return None
        if self.harmony is not None:
            free = params.grammar is None and tools is not None and not tools.forced
            return rest if plan.begun_text else self.harmony.after_analysis(tags, rest, free)
        if self.thinking is not None:
            return self.thinking.grammar(plan.beginning, tags, rest)
        return rest


def _ids(tags: tuple[str, ...] | list[str], tokenizer: Tokenizer) -> frozenset[int]:
    found = (tokenizer.token_id(tag) for tag in tags)
    return frozenset(each for each in found if each is not None)
