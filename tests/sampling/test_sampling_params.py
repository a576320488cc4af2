"""SamplingParams refuse what cannot be, by the name of the field, and keep what can."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling.params import BadWords, SamplingParams

HUGE = 10**6000  # an integer that Python will neither turn into a float nor print


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 1e7, math.nan, math.inf, -math.inf, "1", None, True, HUGE, -HUGE, [1]]),
        ("top_k", [-2, 2**31, 1.0, -1.0, "5", None, True, HUGE]),
        ("top_p", [0, 0.0, -1, 1.0001, math.nan, math.inf, "0.9", None, HUGE]),
        ("min_p", [-1e-9, 2, math.nan, "0.1", None]),
        ("repetition_penalty", [0, -1, 0.001, 101, math.nan, math.inf, "1", None, HUGE]),
        ("presence_penalty", [-2.1, 2.1, math.nan, "1", None]),
        ("frequency_penalty", [-2.1, 2.1, math.nan, "1", None]),
        ("seed", [2**64, 2**63, -(2**63) - 1, "7", 1.5, True, HUGE]),
        ("n", [0, -1, 129, 1.5, "2", None, True]),
        ("best_of", [0, -1, 129, 1.5, "2", True]),
        ("max_tokens", [0, -1, 2**31, 1.5, "9"]),
        ("min_tokens", [-1, 2**31, 1.5, "9", None]),
        ("logprobs", [-1, 21, 1.5, "5", True]),
        ("prompt_logprobs", [-1, 21, 1.5, "5", True]),
        ("stop", [5, 1.5, True, [""], "", [b"x"], [None], {"a": 1}, b"x", ["x"] * 129, ["x" * 4097]]),
        ("stop_token_ids", [5, "12", [-1], [2**31], [1.5], ["3"], [True], {"a": 1}]),
        ("allowed_token_ids", [[], (), 5, "12", [-1], [2**31], [1.5], ["3"], [None]]),
        ("bad_words", [5, [""], "", " ", ["  "], [b"x"], [None], {"a": 1}, ["x" * 129], ["\ud800"], ["x" * 100] * 90]),
        ("logit_bias", [{-1: 1}, {"-1": 1}, {"abc": 1}, {5: "x"}, {5: 1e9}, {5: None}, {5: math.nan}, {5: True}]),
        (
            "logit_bias",
            [{2**31: 1}, {1.0: 1}, {True: 1}, {None: 1}, {5: 1, "5": 1}, {"²": 1}, 5, [5], "5", (5,), {5: HUGE}],
        ),
        ("ignore_eos", ["yes", 1, None]),
        ("include_stop_str_in_output", ["yes", 1, None]),
        ("skip_special_tokens", ["no", 0, None]),
    ],
)
def test_wrong_values_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name) as refusal:
            SamplingParams(**{name: value})
        assert len(str(refusal.value)) < 300


def test_values_at_the_edge_are_accepted():
    for name, values in {
        "temperature": [0, 0.0, 5e-324, 1e6, 1],
        "top_k": [0, 1, 2**31 - 1],
        "top_p": [5e-324, 1, 1.0],
        "min_p": [0, 1, 5e-324],
        "repetition_penalty": [0.01, 1, 100],
        "presence_penalty": [-2, 2.0],
        "seed": [2**63 - 1, 0, -1, -(2**63)],
        "best_of": [1, 128],
        "logprobs": [0, 20],
        "allowed_token_ids": [(0,), (2**31 - 1,)],
        "stop": [("x",), ("x" * 4096,)],
    }.items():
        for value in values:
            assert getattr(SamplingParams(**{name: value}), name) == value


def test_fields_against_each_other():
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=3, best_of=3).num_choices == 3
    assert SamplingParams(n=3, best_of=5).num_choices == 5
    assert SamplingParams(n=3).num_choices == 3


def test_values_are_brought_to_one_form():
    params = SamplingParams(
        stop="x",
        stop_token_ids=[1, 2],
        allowed_token_ids=[3, 1, 3],
        bad_words="no",
        logit_bias={"7": 1, 5: -2},
        top_k=-1,
    )
    assert params.stop == ("x",) and params.stop_token_ids == (1, 2) and params.allowed_token_ids == (1, 3)
    assert params.bad_words == ("no",) and params.logit_bias == ((5, -2.0), (7, 1.0)) and params.top_k == 0
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None) == SamplingParams()
    again = params.with_(temperature=0.5)
    assert again.logit_bias == params.logit_bias and again.temperature == 0.5
    assert hash(again.with_(temperature=1.0)) == hash(params) and again.with_(temperature=1.0) == params
    with pytest.raises(ValueError, match="top_p"):
        params.with_(top_p=2)


# -- bad words


def every_way(text: bytes, spellings: dict[bytes, list[int]]) -> list[tuple[int, ...]]:
    """All token sequences that spell `text`."""
    if not text:
        return [()]
    return [
        (token, *rest)
        for end in range(1, len(text) + 1)
        for token in spellings.get(text[:end], [])
        for rest in every_way(text[end:], spellings)
    ]


PIECES = [b"a", b"b", b" ", b"ab", b"ba", b" a", b" ab", b"aba", b"a", b"c", b"\xc3", b"\xa9", b"\xc3\xa9"]
SPELLINGS: dict[bytes, list[int]] = {}
for _id, _piece in enumerate(PIECES):
    SPELLINGS.setdefault(_piece, []).append(_id)


@given(
    words=st.lists(st.text(alphabet="abé ", min_size=1, max_size=5).filter(lambda word: word.strip(" ")), max_size=3),
    output=st.lists(st.integers(0, len(PIECES) - 1), max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_bad_words_ban_the_last_token_of_every_tokenisation(words, output):
    expected = set()
    for word in words:
        for text in (word.lstrip(" "), " " + word.lstrip(" ")):
            for sequence in every_way(text.encode(), SPELLINGS):
                rest = list(sequence[:-1])
                if not rest or output[-len(rest) :] == rest:
                    expected.add(sequence[-1])
    assert BadWords.compile(words, SPELLINGS).banned(output) == sorted(expected)


def test_a_bad_word_is_banned_with_and_without_a_space_and_in_parts():
    spellings = {
        piece: [id] for id, piece in enumerate([b"London", b" London", b" Lon", b"don", b" London's", b"o", b"n"])
    }
    words = BadWords.compile(["London"], spellings)
    assert words.banned([]) == [0, 1]
    assert words.banned([2]) == [0, 1, 3]
    assert words.banned([2, 5]) == [0, 1]
    assert BadWords.compile([" London"], spellings) == words
    letters = {bytes([byte]): [byte] for byte in range(256)}
    assert BadWords.compile(["London"], letters).banned(list(b"in Londo")) == [ord("n")]
    assert BadWords.compile(["London", "x"], letters).banned(list(b" Londo")) == [ord("n"), ord("x")]
    assert BadWords.compile([], spellings).banned([1, 2]) == []
