"""Beam search: what becomes of a group of sequences when all of its live members have been computed.

The group belongs to the scheduler, as its members do: they are requests that share blocks by forking, and each step a
live member brings the best continuations of its own sequence. `decide` picks among all of them. Rules and scores are
those of Hugging Face transformers: of the best continuations, those within the first `width` places that end the
sequence become hypotheses, scored by log-probability / length ** length_penalty; the best `width` others live on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.kv_layout import KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.plan import Fork, NewBlocks
from headrace.core.request import FinishReason, Request, RequestError, TokenOutput


class Hypothesis(NamedTuple):
    """A sequence that has ended."""

    score: float  # log-probability / length ** length_penalty
    token_ids: list[int]  # output only
    reason: FinishReason


class Continuation(NamedTuple):
    """A sequence that lives on: a member's tokens and one more."""

    member: int
    token: int
    log_probability: float  # of the whole output


@dataclass
class BeamGroup:
    """The members of one beam search; member 0 is the one that waits in the queue for all of them."""

    width: int
    num_best: int
    length_penalty: float
    early_stopping: bool  # end with `width` hypotheses; else when no live sequence can become better than the worst
    members: list[Request] = field(default_factory=list)
    live: dict[int, float] = field(default_factory=lambda: {0: 0.0})  # member -> log-probability of its output
    hypotheses: list[Hypothesis] = field(default_factory=list)  # at most `width`, best first
    _offers: dict[int, Sequence[tuple[int, float]]] = field(default_factory=dict)

    @property
    def leader(self) -> Request:
        return self.members[0]

    def check_fits(self, num_rows: int, layout: KVLayout) -> None:
        """RequestError where a table of `num_rows` rows, or the cache, could never hold all of the members."""
        most = self.width * layout.blocks_for(self.leader.max_len)
        if self.width > num_rows or most > layout.num_blocks:
            raise RequestError(
                f"a beam of {self.width} sequences of {self.leader.max_len} tokens takes {self.width} rows "
                f"(max_num_seqs {num_rows}) and {most} blocks (kv_cache {layout.num_blocks}); "
                "lower beam_width or max_tokens"
            )

    def offer(self, member: Request, candidates: Sequence[tuple[int, float]]) -> bool:
        """A live member's best next tokens with their log-probabilities; True once all live members have offered."""
        self._offers[self.members.index(member)] = candidates
        return len(self._offers) == len(self.live)

    def forget_offers(self) -> None:
        """The members have left the table; what they offered will be computed again."""
        self._offers = {}

    def decide(self) -> list[Continuation]:
        """The sequences that live on, best first; none when the search is over."""
        offers = [
            Continuation(member, token, self.live[member] + log_probability)
            for member, candidates in sorted(self._offers.items())
            for token, log_probability in candidates
        ]
        self._offers = {}
        offers.sort(key=lambda offer: -offer.log_probability)  # stable: of equals the earlier member and token
        first = self.members[next(iter(self.live))]
        length, full = first.num_output + 1, len(first.token_ids) + 1 >= first.max_len
        going: list[Continuation] = []
        for place, offer in enumerate(offers):
            ends = offer.token in first.stop_ids
            if ends or full:
                if place < self.width:
                    self._end(offer, length, FinishReason.STOP if ends else FinishReason.LENGTH)
            elif len(going) < self.width:
                going.append(offer)
        if full or not going or self._done(going[0].log_probability, length):
            return []
        return going

    def outputs(self) -> list[TokenOutput]:
        """Of a search that is over: the best hypotheses, as what the first members bring."""
        best = self.hypotheses[: self.num_best]
        outputs = [
            TokenOutput(member.id, each.token_ids, each.reason, num_cached=member.num_cached, score=each.score)
            for member, each in zip(self.members, best, strict=False)
        ]
        outputs += [
            TokenOutput(member.id, [], FinishReason.ERROR, "so few tokens were allowed that no other sequence was left")
            for member in self.members[len(best) : self.num_best]
        ]
        return outputs

    def _end(self, offer: Continuation, length: int, reason: FinishReason) -> None:
        tokens = [*self.members[offer.member].output_token_ids, offer.token]
        self.hypotheses.append(Hypothesis(offer.log_probability / length**self.length_penalty, tokens, reason))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _done(self, best_log_probability: float, length: int) -> bool:
        if len(self.hypotheses) < self.width:
            return False
        return self.early_stopping or best_log_probability / length**self.length_penalty <= self.hypotheses[-1].score


def regroup(group: BeamGroup, going: Sequence[Continuation], kv: KVCacheManager) -> tuple[list[Fork], list[NewBlocks]]:
    """Make the group's members the sequences of `going`; what the worker has to be told.

    A member that lives on stays where it is with the first of its continuations; the others take over members that die
    or have not lived yet, and share the blocks of the sequence they continue.
    """
    staying: dict[int, Continuation] = {}
    moving = []
    for continuation in going:
        if continuation.member in staying:
            moving.append(continuation)
        else:
            staying[continuation.member] = continuation
    vacant = [index for index in range(group.width) if index not in staying]
    forks, news = [], []
    live = {index: continuation.log_probability for index, continuation in staying.items()}
    for index in vacant:
        kv.free(group.members[index], after_step=-1)  # a beam's rows never run ahead, so no step names these blocks
        group.members[index].become_dormant()
    for index, continuation in zip(vacant, moving, strict=False):
        parent, child = group.members[continuation.member], group.members[index]
        hit = kv.match_fork(parent, child, parent.num_computed)
        assert hit is not None, "a live member has all that its next token sees"
        child.continue_from(parent, continuation.token)
        news += kv.adopt(child, hit)
        forks.append(Fork(parent.row, child.row, continuation.token))
        live[index] = continuation.log_probability
    for index, continuation in staying.items():
        member = group.members[index]
        member.token_ids.append(continuation.token)
        forks.append(Fork(member.row, member.row, continuation.token))
    group.live = live
    return forks, news
