"""Stop strings against brute force: the same text however it is cut, and nothing of a stop string shown."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frontend.stop_strings import StopStrings

texts = st.text(alphabet="ab", max_size=24)
patterns_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def first_stop(text, patterns, free=0):
    """(end, length) of the stop string that ends first, of equals the longest; those ending in text[:free] are passed
    over."""
    for end in range(free + 1, len(text) + 1):
        lengths = [len(p) for p in patterns if text[:end].endswith(p)]
        if lengths:
            return end, max(lengths)
    return None


def held(text, patterns):
    """Characters at the end of `text` that begin a stop string."""
    return max((n for p in patterns for n in range(1, len(p)) if text.endswith(p[:n])), default=0)


@given(text=texts, patterns=patterns_lists, cuts=st.lists(st.integers(0, 24)))
@settings(max_examples=400, deadline=None)
def test_every_cut_finds_the_first_stop(text, patterns, cuts):
    stops, done = StopStrings(patterns), 0
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(edges):
        hit = stops.feed(text[start:end])
        if hit is not None:
            length, used = hit
            assert (start + used, length) == first_stop(text, patterns)
            return
        done = end
        assert stops.held == held(text[:done], patterns)
    assert first_stop(text, patterns) is None


@given(text=texts, patterns=patterns_lists, free=st.integers(0, 24))
@settings(max_examples=400, deadline=None)
def test_stops_that_end_too_early_are_passed_over(text, patterns, free):
    free = min(free, len(text))
    stops = StopStrings(patterns)
    for character in text[:free]:
        assert stops.feed(character, allowed=False) is None
    assert stops.held == held(text[:free], patterns)
    hit = stops.feed(text[free:])
    expected = first_stop(text, patterns, free)
    assert (hit and (free + hit[1], hit[0])) == expected


def test_overlaps():
    stops = StopStrings(["aab"])
    assert stops.feed("aaa") is None and stops.held == 2
    assert stops.feed("b") == (3, 1)
    assert StopStrings(["b", "ab", "cab"]).feed("cab") == (3, 3)  # of those that end together the longest
    assert StopStrings(["abcd", "b"]).feed("abcd") == (1, 2)  # of those that do not, the one that ends first
    assert StopStrings([]).feed("anything") is None
