"""Suffix decoding (Oliaro et al. 2024): what most often followed where the text, far enough back, was the same.

Two histories are searched: the request's own tokens (prompt and output), and the outputs of past requests, of which a
bounded number of tokens is kept. Each is a string of tokens with a chain through the places that share an n-gram, as
the dictionary of an LZ77 compressor (Deutsch 1996, section 4): a few bytes a token, oldest tokens overwritten first.

    tokens   ... a b c x y ... a b c z ... a b c |          the text ends in "a b c"
    chain            ^-----------^-----------^              places that follow "a b c", latest first

Places that match are followed from token to token: one that goes on as the text does gets longer, another is dropped.
The longest ones vote for the continuation, token by token, those that lose a vote are dropped; it ends where less than
`_LEAST` of the votes, multiplied along it, are left, or where it would be twice as long as the match behind it. In a
tree every token with votes is a branch, and the best ones grow.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence

from headrace.core.plan import Admit
from headrace.spec.base import DraftContext, Drafts, padded
from headrace.spec.tree import ROOT, TokenTree, packed

_OWN_GRAM, _SHARED_GRAM = 2, 3  # tokens that must match at least; by chance more match among many texts
_WALK = 8  # places of a chain looked at for each token
_MOST_PLACES = 8  # followed at once
_LONGEST = 64  # tokens of a match that are counted
_LEAST = 0.2  # of the votes
_SURE = 0.9
_SEPARATOR = -1
SHARED_TOKENS = 1 << 18


class History:
    """Tokens, and for each place the one before it that follows the same `gram` tokens. Holds the latest `capacity`."""

    def __init__(self, gram: int, capacity: int | None = None):
        """Without a capacity it grows as long as it is used."""
        self.gram = gram
        self.length = 0  # tokens ever added; places are counted from the first of them
        self._capacity = capacity
        self._tokens = array("i", bytes(4 * capacity) if capacity else b"")
        # the token at a place between `first` and `length`; asked so often that its call is what it costs
        self.token: Callable[[int], int] = self._of_ring if capacity else self._tokens.__getitem__
        self._before = array("q", bytes(8 * capacity) if capacity else b"")
        # a gram's hash -> the place after its latest occurrence; of a ring a table of fixed size, whose entries may
        # serve several grams (0: none, since no gram ends before the first token)
        self._latest: dict[int, int] | array[int] = array("q", bytes(8 * _slots(capacity))) if capacity else {}
        self._mask = _slots(capacity) - 1 if capacity else -1
        self._window: list[int] = []  # the last `gram` tokens

    @property
    def first(self) -> int:
        """The oldest place that is kept."""
        return max(0, self.length - self._capacity) if self._capacity else 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, in order."""
        gram, latest, mask, capacity = self.gram, self._latest, self._mask, self._capacity
        window, place = self._window, self.length
        own, before = self._tokens, self._before
        for token in tokens:
            # the place that follows the window is this token's: entered now that something follows
            previous = 0
            if len(window) == gram:
                key = hash(tuple(window)) & mask
                previous = latest[key] if capacity is not None else latest.get(key, 0)  # type: ignore[union-attr]
                latest[key] = place
                window.pop(0)
            window.append(token)
            if capacity is None:
                own.append(token)
                before.append(previous)
            else:
                own[place % capacity], before[place % capacity] = token, previous
            place += 1
        self.length = place

    def _of_ring(self, place: int) -> int:
        return self._tokens[place % self._capacity]  # type: ignore[operator]

    def places(self, text: Sequence[int], most: int) -> list[int]:
        """Up to `most` places that follow the last `gram` tokens of `text`, latest first; by hash, so look at them."""
        found: list[int] = []
        if len(text) < self.gram:
            return found
        key, latest, first = hash(tuple(text[-self.gram :])) & self._mask, self._latest, self.first
        place = latest.get(key, 0) if isinstance(latest, dict) else latest[key]
        while place > first and len(found) < most:  # the oldest kept place has nothing kept before it
            found.append(place)
            place = self._before[place % self._capacity if self._capacity else place]
        return found

    def matched(self, place: int, text: Sequence[int]) -> int:
        """How many tokens before `place` are the last ones of `text`, up to _LONGEST."""
        count, most, token_at = 0, min(len(text), place - self.first, _LONGEST), self.token
        while count < most and token_at(place - 1 - count) == text[-1 - count]:
            count += 1
        return count


def _slots(capacity: int) -> int:
    """Entries of the table of a ring: a power of two, so that a hash is brought into it by a mask."""
    return 1 << (capacity - 1).bit_length()


class Follower:
    """The places of a history that match the end of one text, as it grows."""

    def __init__(self, history: History):
        self._history = history
        self._places: dict[int, int] = {}  # place -> tokens that match before it

    def follow(self, news: Sequence[int], text: Sequence[int]) -> None:
        """`news` were added to a text whose last tokens, `news` included, are `text`."""
        history, places = self._history, self._places
        end, first, token_at = history.length, history.first, history.token
        if len(news) > _WALK:  # a prompt, or a long draft: found again by its end
            places = {}
        elif places:
            for token in news:
                places = {
                    place + 1: length + 1
                    for place, length in places.items()
                    if first <= place < end and token_at(place) == token
                }
        for place in history.places(text, _WALK):
            if place not in places and (length := history.matched(place, text)) >= history.gram:
                places[place] = length
        if len(places) > _MOST_PLACES:
            best = sorted(places, key=lambda place: (min(places[place], _LONGEST), place), reverse=True)
            places = {place: places[place] for place in best[:_MOST_PLACES]}
        self._places = places

    def _matches(self) -> dict[int, int]:
        """Place -> tokens that match before it, of the places that something may follow."""
        first, end = self._history.first, self._history.length
        return {place: length for place, length in self._places.items() if first <= place < end}

    def branches(self, depth: int, nodes: int, tree: TokenTree) -> None:
        """Add up to `nodes` likely continuations to a tree, of `depth` tokens at most. Shorter matches have a say here,
        too: a place votes with the square of its length. A token that has all votes is worth `_SURE`."""
        token_at, end, matches = self._history.token, self._history.length, self._matches()
        depth = min(depth, 2 * max(*matches.values(), self._history.gram)) if matches else 0
        # (-value, depth, a number that settles ties, node, what votes for what follows it: place -> weight)
        heap = [(-1.0, 0, 0, ROOT, {place: length * length for place, length in matches.items()})]
        added = ties = 0
        while heap and added < nodes:
            value, at, _, node, voters = heapq.heappop(heap)
            votes: dict[int, dict[int, int]] = {}
            for place, weight in voters.items() if at < depth else ():
                if place < end and (token := token_at(place)) != _SEPARATOR:
                    votes.setdefault(token, {})[place + 1] = weight
            whole = sum(voters.values())
            for token, places in votes.items():
                worth = -value * _SURE * sum(places.values()) / whole
                ties, added = ties + 1, added + 1
                heapq.heappush(heap, (-worth, at + 1, ties, tree.add(node, token, worth), places))

    def continuation(self, most: int) -> tuple[list[int], float]:
        """Up to `most` tokens, and how many of them are expected to be right if votes are probabilities."""
        history, end, places = self._history, self._history.length, self._matches()
        if not places or most < 1:
            return [], 0.0
        longest = max(places.values())
        voters = [place for place, length in places.items() if 4 * length > 3 * longest]
        most = min(most, 2 * max(longest, history.gram))
        token_at = history.token
        tokens: list[int] = []
        certainty, expected = 1.0, 0.0
        while len(tokens) < most and voters:
            says = [token_at(place) for place in voters]
            token = says[0] if len(says) == 1 else max(says, key=says.count)
            certainty *= says.count(token) / len(says)
            if certainty < _LEAST or token == _SEPARATOR:
                break
            tokens.append(token)
            expected += certainty
            voters = [place + 1 for place, said in zip(voters, says, strict=True) if said == token and place + 1 < end]
            if not voters:  # past its own end the text repeats itself, as a loop does
                period = len(tokens)
                expected += certainty * (most - period)
                tokens += [tokens[index % period] for index in range(period, most)]
        return tokens, expected


class _Row:
    """One sequence: its own history, and what matches it."""

    def __init__(self, shared: History | None, num_entered: int):
        self.own = History(_OWN_GRAM)
        self.in_own = Follower(self.own)
        self.shared = shared  # None: this sequence is nobody else's business
        self.in_shared = Follower(shared) if shared is not None else None
        self.num_entered = num_entered  # tokens that are the prompt's, or in the shared history already


class SuffixProposer:
    """A `Proposer` (spec/base.py) that needs no network. Its time a token does not grow with the length of texts."""

    def __init__(self, num_tokens: int, shared_tokens: int = SHARED_TOKENS):
        """Drafts at most `num_tokens` at a time; keeps `shared_tokens` tokens of past outputs (0: none)."""
        if num_tokens < 1:
            raise ValueError(f"at least one token must be drafted, not {num_tokens}")
        self._num_tokens = num_tokens
        self._shared = History(_SHARED_GRAM, shared_tokens) if shared_tokens > 0 else None
        self._rows: dict[int, _Row] = {}

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            # with a salt of its own a request neither sees nor leaves traces; outputs of an earlier stay are entered
            self._rows[admit.row] = _Row(self._shared if admit.cache_salt is None else None, len(admit.token_ids))

    def release(self, rows: Sequence[int]) -> None:
        for number in rows:
            row = self._rows.pop(number, None)
            if row is not None and row.shared is not None and row.own.length > row.num_entered:
                output = [row.own.token(place) for place in range(row.num_entered, row.own.length)]
                row.shared.extend([*output, _SEPARATOR])

    def propose(self, context: DraftContext) -> Drafts | None:
        if context.nodes:
            trees = [
                self._tree_of(row, context, count)
                for row, count in zip(context.rows.tolist(), context.limits, strict=True)
            ]
            return packed(trees, context.nodes)
        return padded(
            [
                self._of_row(row, context, count)
                for row, count in zip(context.rows.tolist(), context.limits, strict=True)
            ]
        )

    def _tree_of(self, number: int, context: DraftContext, limit: int) -> TokenTree:
        row, limit, tree = self._follow(number, context), min(limit, self._num_tokens), TokenTree()
        row.in_own.branches(limit, context.nodes, tree)
        if row.in_shared is not None:
            row.in_shared.branches(limit, context.nodes, tree)
        return tree

    def _follow(self, number: int, context: DraftContext) -> _Row:
        """The row, which has taken in the tokens that are new."""
        row, length = self._rows[number], int(context.num_tokens[number])
        known = row.own.length
        text = context.token_ids[number, max(0, min(known, length - _LONGEST)) : length].tolist()
        news = text[len(text) - (length - known) :] if length > known else []
        row.own.extend(news)
        row.in_own.follow(news, text)
        if row.in_shared is not None:
            row.in_shared.follow(news, text)
        return row

    def _of_row(self, number: int, context: DraftContext, limit: int) -> list[int]:
        row, limit = self._follow(number, context), min(limit, self._num_tokens)
        tokens, expected = row.in_own.continuation(limit)
        if row.in_shared is not None:
            others, hoped = row.in_shared.continuation(limit)
            if hoped > expected:
                tokens = others
        return tokens
