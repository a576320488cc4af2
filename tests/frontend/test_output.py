"""ChoiceStream: text, stop strings, log-probabilities and the choice among candidates, over a fake tokenizer."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.plan import Logprob
from headrace.core.request import FinishReason, TokenOutput
from headrace.frontend.output import ChoiceStream, CompletionOutput, RequestOutput
from headrace.sampling.params import SamplingParams

PIECES = [b"a", b"b", b"ab", b"", b"\xc3", b"\xa9", "é".encode(), b"ba ", b"<end>"]
END = 8


class FakeDetokenizer:
    def __init__(self, special):
        self.special, self.waiting = special, b""

    def add(self, ids):
        self.waiting += b"".join(PIECES[id] for id in ids if id not in self.special)
        for cut in range(len(self.waiting), max(-1, len(self.waiting) - 2), -1):
            if not self.waiting[:cut].endswith(b"\xc3"):
                text, self.waiting = self.waiting[:cut], self.waiting[cut:]
                return text.decode("utf-8", "replace")
        return ""

    def finish(self):
        text, self.waiting = self.waiting, b""
        return text.decode("utf-8", "replace")


class FakeTokenizer:
    def detokenizer(self, skip_special_tokens=True, kept=frozenset()):
        return FakeDetokenizer({END} if skip_special_tokens else set())


def make(count=1, **options):
    params = SamplingParams(**options)
    output = RequestOutput("r", "p", [1, 2], [CompletionOutput(i) for i in range(params.num_choices)])
    streams = [ChoiceStream(output, i, params, FakeTokenizer()) for i in range(params.num_choices)]
    return output, streams if len(streams) > 1 else streams[0]


def feed(stream, pieces, reason=FinishReason.LENGTH):
    """All updates of tokens arriving in `pieces`; the last piece carries `reason`."""
    updates = []
    for index, tokens in enumerate(pieces):
        last = index == len(pieces) - 1
        updates += stream.add(TokenOutput("r", list(tokens), reason if last else None))
        if stream.choice.finish_reason is not None:
            break
    return updates


def whole_text(tokens):
    return b"".join(PIECES[t] for t in tokens if t != END).decode("utf-8", "replace")


def cut_in(tokens, cuts):
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


@given(
    tokens=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    stop=st.lists(st.text(alphabet="abé ", min_size=1, max_size=4), max_size=3).map(tuple),
    cuts=st.lists(st.integers(1, 12)),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_cut_gives_the_text_of_brute_force(tokens, stop, cuts, min_tokens, include):
    # by definition: add a token at a time, finish, and look for the first stop string that a late enough token ends
    expected, used = whole_text(tokens), len(tokens)
    stopped = False
    lone = FakeDetokenizer({END})
    text = ""
    for count, token in enumerate([*tokens, None], start=1):
        before, text = text, text + (lone.finish() if token is None else lone.add([token]))
        if count < min_tokens and token is not None:
            continue
        if token is None and len(tokens) < min_tokens:
            break
        ends = [e for e in range(len(before) + 1, len(text) + 1) if any(text[:e].endswith(s) for s in stop)]
        if ends:
            length = max(len(s) for s in stop if text[: ends[0]].endswith(s))
            expected = text[: ends[0]] if include else text[: ends[0] - length]
            used, stopped = min(count, len(tokens)), True
            break
    output, stream = make(stop=stop, min_tokens=min_tokens, include_stop_str_in_output=include)
    updates = feed(stream, cut_in(tokens, cuts))
    choice = output.outputs[0]
    assert choice.text == expected == "".join(update.text for update in updates)
    assert choice.token_ids == tokens[:used] == [t for update in updates for t in update.token_ids]
    assert choice.finish_reason == ("stop" if stopped else "length")
    assert (choice.stop_reason in stop) if stopped else choice.stop_reason is None


def test_early_stop_strings_are_passed_over():
    # field case P13: completed by token 1 and again by token 3, with min_tokens=2
    output, stream = make(stop=("ab",), min_tokens=2)
    feed(stream, [[2], [0], [1], [0], [0]])
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("ab", [2, 0, 1])
    assert output.outputs[0].stop_reason == "ab"


def test_nothing_of_a_stop_string_is_shown_before_it_is_known():
    output, stream = make(stop=("abab",))
    shown = [update.text for update in feed(stream, [[0], [1], [0], [0], [1], [0], [1], [0]])]
    assert shown == ["", "", "", "aba", "", "", ""]
    assert output.outputs[0].text == "aba" and output.outputs[0].finish_reason == "stop"


def test_held_text_is_shown_when_the_request_ends():
    for reason in (FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR):
        output, stream = make(stop=("abab",))
        feed(stream, [[0], [1, 0]], reason)
        assert output.outputs[0].text == "aba" and output.outputs[0].finish_reason == str(reason)


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_the_text(include):
    output, stream = make(include_stop_str_in_output=include, skip_special_tokens=False)
    feed(stream, [[0], [1, END]], FinishReason.STOP)
    choice = output.outputs[0]
    assert choice.token_ids == [0, 1, END] and choice.stop_reason == END and choice.finish_reason == "stop"
    assert choice.text == ("ab<end>" if include else "ab")


def test_an_error_comes_with_its_text():
    output, stream = make()
    (update,) = stream.add(TokenOutput("r", [], FinishReason.ERROR, "why"))
    assert update.choice.error == "why" and output.finished and output.outputs[0].finish_reason == "error"


# -- log-probabilities


def entry(token, logprob):
    return {token: Logprob(logprob, 1), 99: Logprob(logprob - 1, 2)}


def test_logprobs_go_with_the_tokens_taken():
    output, stream = make(stop=("ab",), logprobs=1)
    news = TokenOutput("r", [7, 0, 1, 0], None, None, [entry(7, -1.0), entry(0, -2.0), entry(1, -3.0), entry(0, -4.0)])
    (update,) = stream.add(news)
    choice = output.outputs[0]
    assert choice.token_ids == [7, 0, 1] and choice.logprobs == news.logprobs[:3] == update.logprobs
    assert choice.cumulative_logprob == -6.0


def test_logprobs_are_there_only_if_asked_for():
    output, stream = make()
    (update,) = stream.add(TokenOutput("r", [0], None, None, [entry(0, -1.0)]))
    assert update.logprobs is None and output.outputs[0].logprobs is None
    output, stream = make(logprobs=0)
    assert output.outputs[0].logprobs == []
    (update,) = stream.add(TokenOutput("r", [], FinishReason.ABORT))
    assert update.logprobs == [] and output.outputs[0].logprobs == []


def test_prompt_logprobs_stand_beside_the_prompt():
    output, stream = make(prompt_logprobs=1)
    assert output.prompt_logprobs is None
    stream.add(TokenOutput("r", [0], None, prompt_logprobs=[entry(2, -0.5)]))
    stream.add(TokenOutput("r", [0], None))
    assert output.prompt_logprobs == [None, entry(2, -0.5)]


# -- best_of


def test_best_of_keeps_the_most_likely_per_token_and_shows_nothing_before():
    output, streams = make(n=2, best_of=4)
    lengths, sums = [1, 2, 4, 1], [-3.0, -2.0, -2.0, -9.0]  # per token: -3, -1, -0.5, -9
    shown = []
    for index in (2, 0, 3, 1):
        count = lengths[index]
        each = [entry(0, sums[index] / count)] * count
        shown.append(streams[index].add(TokenOutput("r", [0] * count, FinishReason.LENGTH, None, each)))
    assert shown[:3] == [[], [], []]
    assert [(u.choice.index, u.text, len(u.token_ids)) for u in shown[3]] == [(0, "aaaa", 4), (1, "aa", 2)]
    assert [choice.text for choice in output.outputs] == ["aaaa", "aa"] and output.finished
    assert all(choice.logprobs is None for choice in output.outputs)


def test_best_of_prefers_choices_that_came_to_an_end():
    output, streams = make(n=1, best_of=3)
    streams[0].add(TokenOutput("r", [], FinishReason.ERROR, "broken"))
    streams[1].add(TokenOutput("r", [0], FinishReason.ABORT, None, [entry(0, -0.1)]))
    streams[2].add(TokenOutput("r", [1], FinishReason.LENGTH, None, [entry(1, -5.0)]))
    assert [choice.text for choice in output.outputs] == ["b"] and output.outputs[0].index == 0
