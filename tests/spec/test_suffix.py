"""Suffix decoding: what it drafts, held against a search of the whole text, and the memory it is bounded to."""

import random
from dataclasses import replace

import numpy as np
import pytest

from headrace.core.plan import Admit
from headrace.sampling.params import SamplingParams
from headrace.spec.base import DraftContext
from headrace.spec.suffix import Follower, History, SuffixProposer

ADMIT = Admit(0, "a", [1, 2], 2, 0, SamplingParams(), 0, 0, frozenset())
TEXT = [5, 6, 7, 8, 9, 10, 11, 12]


def propose(proposer, text, limit=8):
    table = np.zeros((1, 4000), np.int32)
    table[0, : len(text)] = text
    drafts = proposer.propose(DraftContext(np.array([0]), table, np.array([len(text)]), [limit]))
    return [] if drafts is None else [t for t in drafts.tokens[0].tolist() if t >= 0]


def proposer_of(text, limit=8, **options):
    proposer = SuffixProposer(8, **options)
    proposer.admit([ADMIT])
    return propose(proposer, text, limit)


def test_the_continuation_is_at_most_twice_the_match():
    assert proposer_of([*TEXT, 1, 5, 6]) == [7, 8, 9, 10]
    assert proposer_of([*TEXT, 1, 5, 6, 7]) == [8, 9, 10, 11, 12, 1]
    assert proposer_of([*TEXT, 1, 5, 6, 7, 8], limit=1) == [9]
    assert proposer_of([*TEXT, 1, 5, 6, 7, 8], limit=0) == []
    assert proposer_of(TEXT) == [] and proposer_of([1]) == []


def test_a_loop_goes_on():
    assert proposer_of([1, 7, 8, 7, 8, 7, 8, 7, 8]) == [7, 8, 7, 8, 7, 8, 7, 8]


def test_the_longest_match_decides_and_equals_vote():
    assert proposer_of([1, 2, 3, 50, 9, 2, 3, 60, 9, 2, 3, 60, 8, 1, 2, 3])[0] == 50, "three tokens over two"
    assert proposer_of([1, 2, 50, 9, 1, 2, 60, 8, 1, 2, 50, 7, 1, 2])[0] == 50, "two votes over one"
    assert proposer_of([1, 2, 3, 40, 1, 2, 3, 41, 1, 2, 3, 42, 1, 2, 3, 43, 1, 2, 3, 44, 1, 2, 3, 45, 0, 1, 2, 3]) == []


def test_outputs_of_past_requests_are_found_unless_a_salt_keeps_them():
    def second(first_salt, second_salt):
        proposer = SuffixProposer(8)
        proposer.admit([replace(ADMIT, cache_salt=first_salt)])
        propose(proposer, [1, 2, *TEXT])
        proposer.release([0])
        proposer.admit([replace(ADMIT, cache_salt=second_salt)])
        return propose(proposer, [1, 2, 99, 6, 7, 8])

    assert second(None, None) == [9, 10, 11, 12]
    assert second("one", None) == second(None, "two") == second("one", "one") == []
    proposer = SuffixProposer(8, shared_tokens=0)
    proposer.admit([ADMIT])
    propose(proposer, [1, 2, *TEXT])
    proposer.release([0])
    proposer.admit([ADMIT])
    assert propose(proposer, [1, 2, 99, 6, 7, 8]) == []


def test_prompts_are_not_remembered_and_nothing_is_entered_twice():
    proposer = SuffixProposer(8)
    proposer.admit([replace(ADMIT, token_ids=[1, 2, *TEXT])])
    propose(proposer, [1, 2, *TEXT])
    proposer.release([0])
    proposer.admit([ADMIT])
    assert propose(proposer, [1, 2, 99, 6, 7, 8]) == [], "the prompt of another request"
    before = proposer._shared.length
    propose(proposer, [1, 2, 99, 6, 7, 8, 30, 31])
    proposer.release([0])  # preempted: 6 tokens of output and the separator
    assert proposer._shared.length == before + 7
    proposer.admit([replace(ADMIT, token_ids=[1, 2, 99, 6, 7, 8, 30, 31])])
    propose(proposer, [1, 2, 99, 6, 7, 8, 30, 31, 32])
    proposer.release([0])
    assert proposer._shared.length == before + 9


def longest_match(text):
    """By looking everywhere: the longest end of the text that is there once more before it, from two tokens on."""
    best = 0
    for place in range(2, len(text)):
        count = 0
        while count < place and text[place - 1 - count] == text[-1 - count]:
            count += 1
        best = max(best, count)
    return best if best >= 2 else 0


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_match_is_that_of_an_exhaustive_search(seed):
    rng = random.Random(seed)
    words = [[rng.randrange(40) for _ in range(rng.randrange(3, 12))] for _ in range(6)]
    text = [token for _ in range(30) for token in rng.choice(words)]
    history = History(2)
    follower = Follower(history)
    done, agreed, asked = 0, 0, 0
    while done < len(text):
        step = rng.choice((1, 1, 2, 5))
        news = text[done : done + step]
        history.extend(news)
        done += len(news)
        follower.follow(news, text[max(0, done - 64) : done])
        wanted = longest_match(text[:done])
        if wanted and wanted < 64:
            asked += 1
            agreed += max(follower._places.values(), default=0) == wanted
    # places are looked for among the latest eight of a pair of tokens: rarely is the longest match not among them
    assert asked > 20 and agreed >= 0.9 * asked


def test_a_ring_forgets_the_oldest_and_never_reads_what_it_overwrote():
    rng = random.Random(1)
    history, everything = History(3, capacity=50), []
    follower = Follower(history)
    for _ in range(60):
        piece = [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
        history.extend(piece)
        everything += piece
        text = [rng.randrange(4) for _ in range(12)]
        follower.follow(text, text)
        assert history.first == max(0, len(everything) - 50)
        for place, length in follower._places.items():
            assert history.first <= place - length and length >= 3
            assert everything[place - length : place] == text[len(text) - length :]
        tokens, expected = follower.continuation(6)
        assert 0 <= expected <= len(tokens) <= 6
