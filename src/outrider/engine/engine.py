"""The engine: one step takes every running request a little further."""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
import torch

from outrider.checks import INT32_MAX, integer, shown
from outrider.drafting.source import DraftSource
from outrider.engine.batch import pack
from outrider.engine.features import SlotFeatures, slots_of
from outrider.engine.intake import Intake
from outrider.engine.load import LoadMeter
from outrider.engine.output import TokenizerLike
from outrider.engine.request import Request, RequestGroup, Status
from outrider.engine.scheduler import Schedule, Scheduler
from outrider.engine.speculation import Proposal, Speculation, each_and_then_raise
from outrider.engine.tenancy import tenancy_of
from outrider.engine.times import StepTimes
from outrider.engine.verification import MatchingVerifier, NewTokens, Verifier
from outrider.errors import ConfigError, SourceError
from outrider.policy.cost import CostModel
from outrider.policy.feedback import record
from outrider.policy.measure import surface_of
from outrider.policy.planner import Planner
from outrider.policy.view import Policy, StepView
from outrider.results import Logprob, SpeculativeMetrics, StreamChunk
from outrider.sampling_params import SamplingParams
from outrider.target.base import PAGE_SIZE, ForwardBatch, Target
from outrider.target.kv import KVArena, pages_for
from outrider.terms import Terms
from outrider.threads import one_thread

DRAFT_ROWS = 8  # rows per decoding request that prompts leave free: one row tile of a linear
PROMPT_SLOWDOWN = 2.0  # how much longer prompts may make a step in which others decode …
PROMPT_ROWS = 16  # … unless they would not get even so many rows
MAX_ROWS = 1 << 20  # of one forward: the cost of each number of rows is kept
TARGET = "target"  # source of the tokens nobody drafted


@dataclass(slots=True)
class Verified:
    """One forward and what the accept rule made of it: new tokens for every proposal."""

    batch: ForwardBatch
    features: torch.Tensor | None  # [T, layers * hidden]
    found: list[NewTokens]


class Engine:
    """Drives one target and its draft sources.

    Threads take turns: whoever calls a method that changes something holds `lock`, which is that
    of the target, since engines may share one.
    """

    def __init__(
        self,
        target: Target,
        sources: Sequence[DraftSource] = (),
        *,
        verifier: Verifier | None = None,
        tokenizer: TokenizerLike | None = None,
        eos_token_ids: Sequence[int] = (),
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        kv_cache_tokens: int = 16384,
        max_model_len: int | None = None,
        planner: Policy | None = None,
        seed: int | None = None,
        reuse_prefixes: bool = True,
        strict_sources: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        check_sizes(max_num_seqs, max_num_batched_tokens, kv_cache_tokens, max_model_len)
        num_pages = pages_for(kv_cache_tokens)
        limit = max_model_len or target.max_model_len
        if limit > target.max_model_len:
            raise ConfigError(
                f"max_model_len must be at most the {target.max_model_len} of the target, "
                f"got {max_model_len}"
            )
        self.target = target
        self.tokenizer = tokenizer
        self.verifier = verifier or MatchingVerifier(eos_token_ids)
        self.max_model_len = min(limit, num_pages * PAGE_SIZE)  # one request always fits alone
        self.arena = KVArena(num_pages)
        self.cost = CostModel(max_num_batched_tokens)
        self.planner: Policy = planner or Planner(self.cost, self.verifier.is_biased)
        self.speculation = Speculation(
            sources,
            self.planner,
            target,
            self.arena,
            self.verifier.is_biased,
            strict_sources,
        )
        self._load = LoadMeter()
        self.scheduler = Scheduler(
            self.arena,
            max_num_seqs,
            max_num_batched_tokens,
            DRAFT_ROWS if sources else 0,
            prompt_rows=partial(prompt_rows, self.cost, max_num_batched_tokens),
            clock=clock,
            reuse_prefixes=reuse_prefixes,
        )
        self.metrics = SpeculativeMetrics()  # over all requests
        self.metrics_by_kind: dict[str, SpeculativeMetrics] = {}  # by what users say they ask for
        self.times = StepTimes()
        self._clock = clock
        self._intake = Intake(
            target.vocab_size,
            self.max_model_len,
            tuple(eos_token_ids),
            tokenizer,
            bool(sources),
            clock,
        )
        self._slot_features = SlotFeatures(num_pages, target.dtype)
        self._random = random.Random(seed)
        self._groups: dict[str, RequestGroup] = {}
        self._names: set[str] = set()  # of all their choices
        self._chunks: list[StreamChunk] = []
        self._token_texts: dict[int, str] = {}
        self._tenancy = tenancy_of(target)
        self._tenant = object()  # stands for this engine, without keeping it alive
        self._tenancy.take(target, self._tenant, num_pages)
        self.speculation.bind(target, tokenizer, max_num_seqs)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Re-entrant; to be held in every call that changes something."""
        return self._tenancy.lock

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a chunk was not yet taken."""
        return self.scheduler.has_work or bool(self._chunks)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        prediction: Sequence[int] | None = None,
        terms: Terms | None = None,
    ) -> None:
        """Queue a prompt; its chunks come from `step` under this id.

        Raises:
            PromptError: the prompt is empty, too long for context or KV, or holds unknown ids.
            SamplingError: a parameter names ids outside the vocabulary, or terms a source that is
                not here.
            ConfigError: a request under way has this id, or one of its choices ("a#0" of "a").
        """
        self.speculation.check_terms(terms or Terms())
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        group = self._intake.admit(
            request_id, prompt_token_ids, params, prompt, prediction, seed, terms or Terms()
        )
        names = {choice.request_id for choice in group.choices}
        if request_id in self._groups or not self._names.isdisjoint(names):
            raise ConfigError(f"request id {shown(request_id)} is in use by one under way")
        self._groups[request_id] = group
        self._names |= names
        for choice in group.choices:
            self.scheduler.add(choice)

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, terms: Terms | None = None
    ) -> None:
        """Raise what `add_request` would raise, and queue nothing."""
        self.speculation.check_terms(terms or Terms())
        self._intake.check(prompt_token_ids, params)

    def measure_costs(self) -> None:
        """Let the planner know what forwards take on this machine: from the cache, or in seconds.

        What is in the KV of the target is lost; nothing may be under way.
        """
        assert not self.scheduler.has_work, "requests are under way"
        self.cost.use(surface_of(self.target, self.arena.num_pages, self.scheduler.max_rows))

    def abort(self, *request_ids: str) -> None:
        """End requests now; nothing happens to one that is unknown or finished.

        Raises:
            SourceError: with `strict_sources`, a draft source failed to forget one. All of them
                have ended all the same.
        """
        groups = [self._groups[name] for name in request_ids if name in self._groups]
        choices = [choice for group in groups for choice in group.choices]
        each_and_then_raise(
            partial(self._abort, choice)
            for choice in choices
            if choice.status is not Status.FINISHED
        )

    def _abort(self, choice: Request) -> None:
        with suppress(Exception):  # its last text may be what has failed: it is then left out
            choice.output.finish("abort")
        self.scheduler.remove(choice)
        self._emit(choice, [], [], [], None)
        self._release(choice.request_id)

    def step(self) -> list[StreamChunk]:
        """Take every running request further; returns what was added to each choice.

        Raises:
            SourceError: a draft source failed, and `strict_sources` was asked for. No request is
                lost and the engine stays usable.
        """
        if self.scheduler.has_work:
            self.times.begin()
            schedule = self._schedule()
            view, proposals = self._plan(schedule)
            self._propose(view, proposals)
            verified = self._verify(schedule, proposals)
            with self._whole_or_aborted(schedule):
                self._commit(schedule, proposals, verified)
                self._tell_sources(proposals)
        chunks, self._chunks = self._chunks, []
        return chunks

    @contextmanager
    def _whole_or_aborted(self, schedule: Schedule) -> Iterator[None]:
        """An interrupt (Ctrl-C) inside leaves no request half advanced: they are aborted."""
        try:
            yield
        except SourceError:  # raised when all is recorded
            raise
        except BaseException:
            requests = [work.request for work in schedule.works]
            requests = [one for one in requests if one.group.request_id in self._groups]
            told = {(one.request_id, one.index) for one in self._chunks if one.finish_reason}
            ended = [one for one in requests if one.status is Status.FINISHED]
            ended = [one for one in ended if (one.group.request_id, one.index) not in told]
            for request in ended:
                request.output.finish_reason = "abort"
                with suppress(Exception):  # what is under way already says more
                    self._emit(request, [], [], [], None)
            with suppress(SourceError):
                self.abort(*(one.group.request_id for one in requests))
            raise

    def check_integrity(self) -> None:
        """Assert that KV pages are held as counted, and every owner is a running request."""
        self.arena.check_integrity()
        running = {request.request_id for request in self.scheduler.running}
        assert set(self.arena.owners) == running, (self.arena.owners, running)

    def _schedule(self) -> Schedule:
        lost: list[Request] = []
        if not self._tenancy.take(self.target, self._tenant, self.arena.num_pages):
            lost = self.scheduler.preempt_all()
        schedule = self.scheduler.schedule()
        each_and_then_raise(
            [
                *(partial(self._release, one.request_id) for one in [*lost, *schedule.preempted]),
                partial(self._hand_on_features, schedule.adopted),
            ]
        )
        self.times.lap("schedule")
        return schedule

    def _plan(self, schedule: Schedule) -> tuple[StepView, list[Proposal]]:
        room = self.scheduler.max_rows - schedule.num_rows
        load = self._load.facts(schedule, self.scheduler, self.speculation.guard.health)
        view, proposals = self.speculation.plan(schedule, room, load, self._clock())
        self.times.lap("plan")
        return view, proposals

    def _propose(self, view: StepView, proposals: list[Proposal]) -> None:
        seconds = self.speculation.propose(view, proposals)
        self.speculation.choose(view, proposals)
        self.times.lap("plan")
        self.times.move("plan", "propose", seconds)

    def _verify(self, schedule: Schedule, proposals: list[Proposal]) -> Verified:
        batch = pack(schedule.works, self.arena, self.speculation.layer_ids)
        self.times.lap("pack")
        output = self.target.forward(batch)
        seconds = self.times.lap("forward")
        works = [proposal.work for proposal in proposals]
        found = self.verifier.verify(output.logits, works) if works else []
        seconds += self.times.lap("sample")
        # A tree takes longer than as many rows of chains, and plans know by how much.
        if all(work.may_draft for work in schedule.works) and not batch.is_tree.any():
            self.cost.observe(batch.num_rows, seconds, int(batch.context_lens.sum()))
        return Verified(batch, output.features, found)

    def _commit(self, schedule: Schedule, proposals: list[Proposal], verified: Verified) -> None:
        self._move_branches(proposals, verified.found)
        for work in schedule.works:
            self.arena.commit(work.request.request_id, work.num_rows)
        for proposal, new in zip(proposals, verified.found, strict=True):
            self.arena.commit(proposal.work.request.request_id, len(new.accepted))
        self.scheduler.committed(schedule)
        if verified.features is not None:
            with one_thread():
                self._keep_features(schedule, proposals, verified)
        for proposal, new in zip(proposals, verified.found, strict=True):
            self._append(proposal, new)
        self.times.lap("commit")

    def _move_branches(self, proposals: list[Proposal], found: list[NewTokens]) -> None:
        """Copy the KV of accepted tree branches to the slots behind the text."""
        sources: list[int] = []
        destinations: list[int] = []
        for proposal, new in zip(proposals, found, strict=True):
            if proposal.work.draft.is_tree:
                work = proposal.work
                first = work.context_len + 1
                pages = self.arena.page_table(work.request.request_id)
                slots = slots_of(pages, first, first + len(work.draft)).tolist()
                for place, index in enumerate(new.accepted):
                    if index != place:
                        sources.append(slots[index])
                        destinations.append(slots[place])
        if sources:
            self.target.move_kv(np.array(sources, np.int32), np.array(destinations, np.int32))

    def _keep_features(
        self, schedule: Schedule, proposals: list[Proposal], verified: Verified
    ) -> None:
        """Hand on the features of the rows that were committed, in the order of the text."""
        accepted = {
            id(proposal.work): new.accepted
            for proposal, new in zip(proposals, verified.found, strict=True)
        }
        rows: list[int] = []
        counts: list[int] = []
        starts = verified.batch.row_starts.tolist()
        for work, start in zip(schedule.works, starts, strict=False):
            kept = accepted.get(id(work), [])
            rows.extend(range(start, start + work.num_rows))
            rows.extend(start + work.num_rows + index for index in kept)
            counts.append(work.num_rows + len(kept))
        features = verified.features
        assert features is not None
        if len(rows) < len(features):
            features = features.index_select(0, torch.tensor(rows, device=features.device))
        requests = [work.request for work in schedule.works]
        self.speculation.keep_features(requests, features, counts)
        if self.scheduler.reuse_prefixes:
            slots = [
                slots_of(self.arena.page_table(work.request.request_id), first, first + count)
                for work, count in zip(schedule.works, counts, strict=True)
                for first in [work.context_len]
            ]
            self._slot_features.keep(np.concatenate(slots), features)

    def _hand_on_features(self, adopted: Sequence[Request]) -> None:
        """Sources want the features of every token, of those too that no forward runs over."""
        for request in adopted if self.speculation.layer_ids else ():
            pages = self.arena.page_table(request.request_id)
            slots = slots_of(pages, 0, self.arena.num_committed(request.request_id))
            self.speculation.keep_features([request], self._slot_features.of(slots), [len(slots)])

    def _append(self, proposal: Proposal, new: NewTokens) -> None:
        """Add the new tokens of one choice up to the end of its output."""
        request, outcome = proposal.work.request, proposal.outcome
        proposal.accepted_ids = new.token_ids
        taken = request.output.extend(new.token_ids)
        if new.error is not None:
            request.output.finish("error", new.error)
        drafted = min(taken, len(new.accepted))
        token_ids = new.token_ids[:taken]
        sources = [outcome.draft.source_of(i) for i in new.accepted[:drafted]]
        sources += [TARGET] * (taken - drafted)
        given = outcome.draft.confidence
        confidences = [given[i] if given else None for i in new.accepted[:drafted]]
        confidences += [None] * (taken - drafted)
        request.tokens.extend(token_ids)
        logprobs = None if new.logprobs is None else new.logprobs[:taken]
        outcome.accepted = new.accepted
        outcome.num_accepted_drafts = len(new.accepted)
        outcome.num_emitted_drafts = drafted
        outcome.num_new_tokens = taken
        record(self.metrics, outcome)
        kind = proposal.ask.kind
        record(self.metrics_by_kind.setdefault(kind, SpeculativeMetrics()), outcome)
        metrics = request.group.metrics
        if metrics.speculative_decoding is not None:
            record(metrics.speculative_decoding, outcome)
        if metrics.first_token_time is None:
            metrics.first_token_time = self._clock()
        if request.output.finish_reason is None:
            self.arena.rollback(request.request_id)
        else:
            self.scheduler.remove(request)
        self._emit(request, token_ids, sources, confidences, logprobs)

    def _tell_sources(self, proposals: list[Proposal]) -> None:
        """Feedback of this step; ended requests are forgotten whatever a source raises."""
        requests = [proposal.work.request for proposal in proposals]
        ended = [request for request in requests if request.status is Status.FINISHED]
        try:
            each_and_then_raise(
                [
                    partial(self.speculation.observe, proposals),
                    *(partial(self.speculation.finish, request) for request in ended),
                    *(partial(self._release, request.request_id) for request in ended),
                ]
            )
        finally:
            self.times.lap("propose")

    def _release(self, request_id: str) -> None:
        self.verifier.release(request_id)
        self.speculation.release(request_id)

    def _emit(
        self,
        request: Request,
        token_ids: list[int],
        sources: list[str],
        confidences: list[float | None],
        logprobs: list[dict[int, Logprob]] | None,
    ) -> None:
        output, group = request.output, request.group
        output.sources.extend(sources)
        output.confidences.extend(confidences)
        if logprobs is not None and output.logprobs is not None:
            self._name_tokens(logprobs)
            output.logprobs.extend(logprobs)
        chunk = StreamChunk(
            request_id=group.request_id,
            index=request.index,
            text=output.take_text(),
            token_ids=token_ids,
            token_sources=sources,
            token_confidences=confidences,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            logprobs=logprobs,
        )
        if output.finish_reason is not None and group.finished:
            group.metrics.finished_time = self._clock()
            chunk.result = group.result()
            del self._groups[group.request_id]
            self._names.difference_update(choice.request_id for choice in group.choices)
        self._chunks.append(chunk)

    def _name_tokens(self, logprobs: list[dict[int, Logprob]]) -> None:
        if self.tokenizer is None:
            return
        for entry in logprobs:
            for token, logprob in entry.items():
                text = self._token_texts.get(token)
                if text is None:
                    text = self.tokenizer.text_of(token)
                    self._token_texts[token] = text
                logprob.decoded_token = text


def prompt_rows(cost: CostModel, max_rows: int, decoding: int, context: int) -> int:
    """Rows of prompts beside decoding requests of so many tokens, by what a step may take."""
    seconds = cost.seconds(decoding, max_rows, context)
    return max(PROMPT_ROWS, bisect_right(seconds, PROMPT_SLOWDOWN * seconds[0]) - 1)


def check_sizes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_tokens: int | None,
    max_model_len: int | None,
) -> None:
    """Raise ConfigError unless all are positive integers that can be; None is to be chosen."""
    integer("max_num_seqs", max_num_seqs, 1, MAX_ROWS)
    integer("max_num_batched_tokens", max_num_batched_tokens, 1, MAX_ROWS)
    if kv_cache_tokens is not None:
        integer("kv_cache_tokens", kv_cache_tokens, 1, INT32_MAX)
    if max_model_len is not None:
        integer("max_model_len", max_model_len, 1, INT32_MAX)
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({max_num_seqs}): every running request needs a row"
        )
