"""Scheduler: which tokens of which requests the next step runs.

In one sentence: every running request that is ready to decode gets its token first; what is left of the token budget
goes to prompts, a quarter of it to those with the least left so that they need not wait behind long ones, the rest by
age; requests are admitted by age while rows and blocks last, and when blocks run out the youngest is preempted and
recomputed later. A policy may ask for less (core/pacing.py). Batch work gives its place to a request that somebody
waits for, unless it is older by BATCH_PATIENCE (core/queue.py).

Memory cannot deadlock: a request that the whole pool could not hold is refused at once, and the oldest request can
always take the blocks of the younger ones.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from headrace.core.beam import BeamGroup, regroup
from headrace.core.drafting import DraftPolicy, NoDrafts, Verified, note_runs
from headrace.core.kv_manager import NO_HIT, KVCacheManager, PrefixHit
from headrace.core.pacing import NoPacing, Pacing
from headrace.core.plan import Admit, Fork, NewBlocks, StepPlan, StepResult
from headrace.core.plan_builder import PlanBuilder, PrefixUse, SchedulerLimits, StepTrace
from headrace.core.queue import RequestQueue
from headrace.core.request import FinishReason, Request, RequestError, TokenOutput
from headrace.core.stop import accept, broken_off
from headrace.core.visits import OneRun, Visits, repeat_runs

_NO_VALUES: list[float] = []


class Scheduler:
    """add() and abort() at any time; schedule() makes a plan, commit() takes its result, in the same order."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        drafting: DraftPolicy | None = None,
        pacing: Pacing | None = None,
        visits: Visits | None = None,
    ):
        self.limits = limits
        self.kv = kv
        self.drafting: DraftPolicy = drafting or NoDrafts()
        self.pacing: Pacing = pacing or NoPacing()
        self.visits: Visits = visits or OneRun()
        self.waiting = RequestQueue(limits.policy)
        self.running: list[Request] = []  # oldest first
        self.trace = StepTrace()
        self.verified: list[Verified] = []  # by the step that committed last
        self._requests: dict[str, Request] = {}
        self._free_rows = deque(range(limits.max_num_seqs))
        self._released: list[int] = []  # rows to be told in the next plan
        # step -> the request of each span; None once it has left the table: nobody waits for the result
        self._in_flight: dict[int, list[Request | None]] = {}
        self._followers: dict[str, list[Request]] = {}  # requests that wait for a leader's prompt to be computed
        self._forks: list[Fork] = []  # to be told in the next plan, with the blocks that come of them
        self._fork_blocks: list[NewBlocks] = []
        self._blocked: Request | None = None  # the request that the last step could not admit
        self._next_step = 0
        self._committed = -1

    # -- requests coming and going

    def add(self, request: Request) -> None:
        """Queue a request; RequestError if it could never run."""
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use; every request needs its own")
        limit = min(self.limits.max_model_len, self.kv.layout.num_tokens)
        if request.prompt_len == 0:
            raise RequestError("the prompt has no tokens; give at least one")
        if request.prompt_len >= limit:
            raise RequestError(
                f"the prompt has {request.prompt_len} tokens and at least one must be generated, but at most {limit} "
                f"fit (max_model_len {self.limits.max_model_len}, KV cache {self.kv.layout.num_tokens}); "
                "shorten the prompt or raise max_model_len / kv_cache"
            )
        request.max_len = min(request.max_len, limit)
        if request.beam is not None:
            self._add_beam(request.beam)
        request.run_ahead(not self.drafting.speculates)
        leader = request.leader
        if leader is not None and leader.id in self._requests and leader.num_output == 0:
            self._followers.setdefault(leader.id, []).append(request)
        else:
            self.waiting.push(request)
        self._requests[request.id] = request

    def _add_beam(self, group: BeamGroup) -> None:
        group.check_fits(self.limits.max_num_seqs, self.kv.layout)
        for member in group.members[1:]:
            member.become_dormant()
            member.runs_ahead = False
            self._requests[member.id] = member

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[TokenOutput]:
        """End requests wherever they are and free what they hold; unknown ids are ignored."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                members = [request] if request.beam is None else request.beam.members
                self._end(request, reason)
                outputs += [broken_off(member, reason) for member in members]
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def num_untold(self, request_id: str) -> int:
        """Tokens that a request has generated and nobody has been told of."""
        request = self._requests.get(request_id)
        return request.num_output if request is not None and request.quiet else 0

    def backlog(self) -> float:
        """Predicted seconds until all prompts known now have been run; 0 where no policy predicts."""
        return self.pacing.backlog(itertools.chain(self.running, self.waiting))

    # -- making a plan

    def schedule(self) -> StepPlan:
        """The next step's plan; its `num_spans` is 0 when nothing can run now."""
        if not self.drafting.may_plan(self._requests.values(), len(self._in_flight)):
            return StepPlan(self._next_step)
        self.kv.pool.settle(self._committed)
        self.trace = StepTrace()
        plan = PlanBuilder(self._next_step, self.limits.max_num_batched_tokens)
        self._displace()
        self._schedule_decodes(plan)
        self._pace(plan)
        self._admit(plan)
        self._schedule_prefills(plan)
        self.trace.num_running, self.trace.num_waiting = len(self.running), len(self.waiting)
        if not plan.requests:
            for admit in plan.admits:
                request = self._requests[admit.request_id]
                if request.row >= 0:  # a beam goes whole with its first member
                    self._preempt(request, taken_back=True)
            return StepPlan(self._next_step)
        # one that was admitted and then preempted for an older one is not told
        plan.admits = [admit for admit in plan.admits if self._requests[admit.request_id].row == admit.row]
        for admit in plan.admits:
            self._requests[admit.request_id].admitted = True
        self.trace.prefixes = [use for use in self.trace.prefixes if self._requests[use.request_id].admitted]
        limits = self.drafting.limits(plan.requests, len(self.running))
        self.trace.decisions += repeat_runs(plan, self.visits, self.kv, self.limits.max_model_len, limits)
        self._in_flight[self._next_step] = list(plan.requests)
        self._next_step += 1
        built = plan.build(self._forks, self._fork_blocks, self._released, limits)
        self.trace.decisions += self.drafting.decisions()
        self._released, self._forks, self._fork_blocks = [], [], []
        return built

    def _schedule_decodes(self, plan: PlanBuilder) -> None:
        # the hot loop of a loaded engine: PlanBuilder.add and Request.num_unscheduled are written out
        plan.spare = plan.budget - len(self.running)  # every running request must get its token
        step, requests, rows, starts = self._next_step, plan.requests, plan.rows, plan.starts
        for request in self.running.copy():
            row, start, promised = request.row, request.num_scheduled, len(request.token_ids)
            if row < 0:  # preempted a moment ago
                continue
            if start >= promised and request.runs_ahead:
                promised = start + 1
            unscheduled = promised - start if promised < request.max_len else 0
            if unscheduled == 1:
                if request.num_drafts and self._add_verification(plan, request, start):
                    continue
                if start < request.num_slots or self._make_room(request, start + 1, plan):
                    requests.append(request)
                    rows.append(row)
                    starts.append(start)
                    request.scheduled_in = step
                    request.num_scheduled = start + 1
            elif unscheduled > 1:
                plan.prefilling.append(request)
        plan.budget = self.limits.max_num_batched_tokens - plan.num_tokens

    def _add_verification(self, plan: PlanBuilder, request: Request, start: int) -> bool:
        """A span of the request's next token and drafts behind it; False if none are worth it or have room."""
        most = min(request.num_drafts, request.max_len - len(request.token_ids) - 1, plan.spare)
        depth = self.drafting.depth(request, most, len(self.running)) if most > 0 else 0
        request.num_drafts = 0
        if not depth:
            return False
        if start + 1 + depth > request.num_slots:
            news = self.kv.allocate(request, start + 1 + depth, plan.copies)
            if news is None:  # nobody is preempted for a guess
                return False
            plan.new_blocks += news
        plan.spare -= depth
        plan.add(request, 1 + depth, depth, True)
        return True

    def _displace(self) -> None:
        """Take the youngest batch work off the table for a request that somebody waits for and that found no room."""
        request, self._blocked = self._blocked, None
        if request is None or request.batch or self.waiting.peek() is not request:
            return
        younger = (r for r in reversed(self.running) if r.batch and self._age(r) > self._age(request))
        victim = next(younger, None)
        if victim is not None:
            self._preempt(victim)
            self.trace.decisions.append(("preempt", victim.id, f"batch work; {request.id} waits for its place"))

    def _pace(self, plan: PlanBuilder) -> None:
        """Leave as much of the budget to prompts as the policy says."""
        prompt = next((r for r in plan.prefilling if r.row >= 0), None) or self.waiting.peek()
        if prompt is not None and plan.budget > 0:
            budget, reason = self.pacing.prompt_tokens(plan, plan.budget, prompt)
            plan.budget = max(1, min(budget, plan.budget))
            if reason:
                self.trace.decisions.append(("prompt tokens", str(plan.budget), reason))

    def _make_room(self, request: Request, num_tokens: int, plan: PlanBuilder) -> bool:
        """Blocks for the first `num_tokens` tokens, preempting the youngest others; False if it must wait."""
        while True:
            news = self.kv.allocate(request, num_tokens, plan.copies)
            if news is not None:
                plan.new_blocks.extend(news)
                return True
            pool = self.kv.pool
            if self.kv.shortfall(request, num_tokens) <= pool.num_free + pool.num_waiting:
                self.trace.refusals.append(f"request {request.id} waits for blocks that steps in flight still use")
                return False
            victim = next((r for r in reversed(self.running) if self._idle(r)), request)
            own = victim is request or (victim.beam is not None and victim.beam is request.beam)
            going = request.num_scheduled > request.num_computed  # then its windows may give blocks back
            if own and (going or not self._idle(request) or self._age(request) < self._age(self.running[-1])):
                # or the younger ones, or others of its own beam, run in this very step
                self.trace.refusals.append(
                    f"request {request.id} waits: needs {self.kv.shortfall(request, num_tokens)} blocks, "
                    f"{pool.num_free} free"
                )
                return False
            self._preempt(victim)
            if own:
                return False

    def _idle(self, request: Request) -> bool:
        """Neither it nor, in a beam, any member has a span in the step being planned: it may be preempted."""
        members = (request,) if request.beam is None else request.beam.members
        return all(member.scheduled_in != self._next_step for member in members)

    def _admit(self, plan: PlanBuilder) -> None:
        """Give rows to waiting requests, oldest first, while the step has work for them and memory holds them."""
        prefilling = [r for r in plan.prefilling if r.row >= 0]
        demand = sum(min(r.num_unscheduled, self.limits.share) for r in prefilling)
        promised = sum(self.kv.promised(r) for r in prefilling)
        while demand < plan.budget and (request := self.waiting.peek()) is not None:
            entering = [request] if request.beam is None else request.beam.members
            held_back = self.pacing.holds_back(self.running, request) if self.running else ""
            if held_back:
                self.trace.refusals.append(f"request {request.id} not admitted: {held_back}")
                self._blocked = request
                return
            if len(self._free_rows) < len(entering):
                self._blocked = request
                self.trace.refusals.append(f"request {request.id} not admitted: all rows are taken (max_num_seqs)")
                return
            hits = [self._find_prefix(each) for each in entering]
            need = sum(
                max(0, self.kv.layout.blocks_for(len(each.token_ids) + 1) - hit.num_blocks) + hit.num_free
                for each, hit in zip(entering, hits, strict=True)
                if each.max_len
            )
            free, spare = self.kv.pool.num_free, len(self.running)  # one block for each that is growing already
            if need + promised + spare > free and self.running:
                self._blocked = request
                self.trace.refusals.append(
                    f"request {request.id} not admitted: needs {need} blocks, {free} free of which {promised} are "
                    f"promised to prompts in progress and {spare} kept for running requests to grow"
                )
                return
            if need > free:  # nothing runs, yet blocks are still waiting for steps in flight
                return
            self.waiting.pop()
            for each, hit in zip(entering, hits, strict=True):
                self._enter_table(each, hit, plan)
                demand += min(each.num_unscheduled, self.limits.share)
                promised += self.kv.promised(each) if each.max_len else 0
        if plan.admits:
            plan.prefilling.sort(key=self._age)

    def _find_prefix(self, request: Request) -> PrefixHit:
        """What of the request is computed already: known blocks, or those of the leader that has its prompt."""
        if request.leader is not None and not request.num_output:
            fork = self.kv.match_fork(request.leader, request, request.prompt_len - 1)
            if fork is not None:
                return fork
        return NO_HIT if request.wants_prompt_logprobs or not request.max_len else self.kv.match(request)

    def _enter_table(self, request: Request, hit: PrefixHit, plan: PlanBuilder) -> None:
        request.row = self._free_rows.popleft()
        self._insert_by_age(request)
        plan.new_blocks += self.kv.adopt(request, hit)
        if request.num_unscheduled:
            plan.prefilling.append(request)
        plan.admits.append(
            Admit(
                row=request.row,
                request_id=request.id,
                token_ids=list(request.token_ids),
                prompt_len=request.prompt_len,
                num_computed=request.num_computed,
                params=request.params,
                seed=request.seed,
                choice=request.choice,
                stop_ids=request.stop_ids,
                bad_words=request.bad_words,
                cache_salt=request.cache_salt,
            )
        )
        if not request.admitted and request.leader is None:  # neither a preempted one's return nor a fork is a hit
            request.num_cached = hit.num_tokens
            self.trace.prefixes.append(PrefixUse(request.id, len(request.token_ids), hit.num_tokens, hit.miss))

    def _schedule_prefills(self, plan: PlanBuilder) -> None:
        if len(plan.prefilling) > 1:
            spared = min(self.limits.share, plan.budget // 2)
            for request in sorted(plan.prefilling[1:], key=lambda r: r.num_unscheduled):
                if spared > 0 and request.row >= 0:
                    spared -= self._schedule_chunk(plan, request, spared)
        for request in plan.prefilling:
            if plan.budget > 0 and request.row >= 0 and request.scheduled_in != self._next_step:
                self._schedule_chunk(plan, request, plan.budget)

    def _schedule_chunk(self, plan: PlanBuilder, request: Request, most: int) -> int:
        """Up to `most` tokens of a prompt; returns how many."""
        unscheduled = request.num_unscheduled
        length = min(unscheduled, most)
        if self._make_room(request, request.num_scheduled + length, plan):
            plan.add(request, length, 0, length == unscheduled)
            return length
        return 0

    # -- taking a result

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """Account for a step that ran; plans commit in the order they were made."""
        outputs: list[TokenOutput] = []
        self.verified = []
        requests = self._in_flight[plan.step_id]  # those that leave meanwhile are taken out
        decodes = plan.num_decodes if result.only_tokens and plan.num_runs == 1 else 0
        self._commit_decodes(requests[:decodes], result.tokens, outputs)
        spans = zip(*plan.spans[2:].tolist(), plan.yields.tolist(), strict=True) if decodes < len(requests) else ()
        for index, (length, num_drafts, yields) in enumerate(spans):
            if index >= decodes and (request := requests[index]) is not None:
                self._commit_span(request, result, index, length * plan.num_runs, num_drafts if yields else -1, outputs)
        del self._in_flight[plan.step_id]
        self._committed = plan.step_id
        self.drafting.observe_step(plan, result)
        return outputs

    def _commit_decodes(
        self, requests: Sequence[Request | None], tokens: list[list[int]], outputs: list[TokenOutput]
    ) -> None:
        """Spans of one token that brought one and nothing else: the hot loop of a loaded engine."""
        block_size, make_output = self.kv.layout.block_size, tuple.__new__  # TokenOutput() was measured to be slower
        for request, new in zip(requests, tokens, strict=False):
            if request is None:
                continue
            request.num_computed = computed = request.num_computed + 1
            if computed % block_size == 0:
                self.kv.advance(request, after_step=self._next_step - 1)
            token, known = new[0], request.token_ids
            if token not in request.stop_ids and len(known) + 1 < request.max_len and not request.wants_prompt_logprobs:
                known.append(token)  # what accept() does, nearly always
                if not request.quiet:
                    news = (request.id, new, None, None, None, None, request.num_cached, None)
                    outputs.append(make_output(TokenOutput, news))
                continue
            outputs += accept(request, new)
            if request.finish_reason is not None:
                self._end(request, request.finish_reason)
        if self._followers:
            for request in filter(None, requests):
                self._queue_followers(request)

    def _commit_span(
        self, request: Request, result: StepResult, index: int, length: int, num_drafts: int, outputs: list[TokenOutput]
    ) -> None:
        """Any span; `num_drafts` is negative of one that does not yield."""
        request.num_computed += length
        if index in result.errors:
            told = [request] if request.beam is None else request.beam.members
            self._end(request, FinishReason.ERROR)
            outputs += [broken_off(each, FinishReason.ERROR, result.errors[index]) for each in told]
            return
        if index in result.prompt_logprobs:  # after a preemption the first come a second time
            had = len(request.prompt_logprobs) - (request.num_computed - length)
            request.prompt_logprobs.extend(result.prompt_logprobs[index][had:])
        if num_drafts >= 0:
            if request.beam is not None:
                if request.beam.offer(request, result.candidates[index]):
                    outputs += self._decide(request.beam)
            else:
                outputs += accept(request, tokens := result.tokens[index], result.logprobs.get(index))
                if num_drafts:
                    runs = result.accepted(index)
                    vain = length - len(runs) - sum(runs)
                    request.num_computed -= vain
                    request.num_scheduled -= vain
                    self.verified += note_runs(self.drafting, request, num_drafts, runs, len(tokens))
                if result.num_drafts:
                    request.num_drafts = result.num_drafts[index]
                    request.draft_values = result.draft_values.get(index, _NO_VALUES)
                if result.draft_sources:
                    request.draft_source = result.draft_sources[index]
                if request.finish_reason is not None:  # tokens behind the one that ended it are no part of it
                    request.num_computed = min(request.num_computed, len(request.token_ids) - 1)
                self._queue_followers(request)
        if request.num_computed // self.kv.layout.block_size > request.num_entered and request.row >= 0:
            self.kv.advance(request, after_step=self._next_step - 1)
        if request.finish_reason is not None and request.row >= 0:
            self._end(request, request.finish_reason)

    def _decide(self, group: BeamGroup) -> list[TokenOutput]:
        """All live members of a beam search have been computed: let the best go on, or end it."""
        going = group.decide()
        if going:
            forks, news = regroup(group, going, self.kv)
            self._forks += forks
            self._fork_blocks += news
            return []
        self._end(group.leader, FinishReason.STOP)
        return group.outputs()

    def _queue_followers(self, leader: Request) -> None:
        for follower in self._followers.pop(leader.id, ()):
            self.waiting.push(follower)

    # -- bookkeeping

    def _age(self, request: Request) -> tuple[float, int]:
        return self.waiting.key(request)

    def _insert_by_age(self, request: Request) -> None:
        index = len(self.running)
        while index and self._age(self.running[index - 1]) > self._age(request):
            index -= 1
        self.running.insert(index, request)

    def _leave(self, request: Request) -> None:
        """Take a running request off the table; its blocks come back when the steps in flight have committed."""
        self.running.remove(request)
        for spans in self._in_flight.values():
            if request in spans:
                spans[spans.index(request)] = None
        self.kv.free(request, after_step=self._next_step - 1)
        self.kv.pool.settle(self._committed)
        if self._forks:
            self._forks = [fork for fork in self._forks if fork.row != request.row]
            self._fork_blocks = [new for new in self._fork_blocks if new.row != request.row]
        self._free_rows.append(request.row)
        self._released.append(request.row)
        request.leave_table()

    def _preempt(self, request: Request, taken_back: bool = False) -> None:
        """Back to the queue, at its age. A beam goes whole. It counts as a preemption if anything computed is lost,
        unless an admission is taken back in the step that made it."""
        members = [request] if request.beam is None else request.beam.members
        for member in members:
            if not taken_back and member.num_scheduled:
                member.num_preemptions += 1
                self.trace.preempted.append(member.id)
            self._leave(member)
        if request.beam is not None:
            request.beam.forget_offers()
        self.waiting.push(members[0])

    def _end(self, request: Request, reason: FinishReason) -> None:
        members = [request] if request.beam is None else request.beam.members
        in_table, waiting = request.row >= 0, self.waiting.remove(members[0].id) is not None
        for member in members:
            member.finish_reason = reason
            del self._requests[member.id]
            self._queue_followers(member)
            if in_table:
                self._leave(member)
        if not in_table and not waiting:
            self._followers[request.leader.id].remove(request)  # type: ignore[union-attr]

    def check(self) -> None:
        """The full account of rows, requests and blocks; raises AssertionError when something is lost."""
        self.kv.check()
        rows = [request.row for request in self.running]
        assert sorted(rows + list(self._free_rows)) == list(range(self.limits.max_num_seqs)), "a row is lost"
        waiting = [request for request in self._requests.values() if request.row < 0]
        heads = [request for request in waiting if request.beam is None or request is request.beam.leader]
        followers = sum(map(len, self._followers.values()))
        assert len(self.running) + len(waiting) == len(self._requests), "a request is lost"
        assert len(self.waiting) + followers == len(heads), "a request waits nowhere"
        if not self._requests:
            assert self.kv.pool.num_held == 0, f"{self.kv.pool.num_held} blocks are held by nobody"
