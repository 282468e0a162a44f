"""Asks the sources for drafts, fits them to the step, and tells the sources what became of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from numbers import Integral
from time import perf_counter
from typing import Any

import torch

from outrider.checks import shown
from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
from outrider.engine.answers import Fields, check_answer, check_source, fields_of
from outrider.engine.drafts import cut_depth, cut_unknown, matched, prefix, shared_part, subset
from outrider.engine.features import WaitingFeatures
from outrider.engine.guard import STALL_PER_TOKEN, STALL_SECONDS, Guard
from outrider.engine.merging import joined
from outrider.engine.request import Request
from outrider.engine.scheduler import Schedule, Work
from outrider.errors import ConfigError, SamplingError, SourceError
from outrider.policy.calibration import extended
from outrider.policy.feedback import DraftOutcome
from outrider.policy.restrict import AllowAll, LoadFacts, RequestFacts, Rules
from outrider.policy.view import Ask, Policy, StepView, has_needed, narrowed
from outrider.policy.weights import weight_of
from outrider.target.base import Target
from outrider.target.kv import KVArena
from outrider.terms import Terms
from outrider.threads import one_thread

MAX_KINDS = 32  # that are told apart: users may write anything there


@dataclass(slots=True)
class Proposal:
    """A request that gets new tokens in this step, and what came of asking for drafts."""

    work: Work
    ask: Ask  # as the planner sees it, with what was proposed
    outcome: DraftOutcome
    accepted_ids: list[int] = field(default_factory=list)  # and the bonus token


def layers_read(sources: Sequence[DraftSource], num_layers: int) -> tuple[int, ...]:
    """Layers of the target, of so many, whose features any of the sources reads; in order.

    Raises:
        ConfigError: the engine could not work with a source.
    """
    for source in sources:
        check_source(source, num_layers)
    return tuple(sorted({layer for source in sources for layer in source.target_layer_ids}))


def _with_distinct_names(sources: Sequence[DraftSource]) -> list[DraftSource]:
    seen: dict[str, int] = {}
    for source in sources:
        seen[source.name] = count = seen.get(source.name, 0) + 1
        if count > 1:
            source.name = f"{source.name}-{count}"
    return list(sources)


def each_and_then_raise(calls: Iterable[Callable[[], object]]) -> None:
    """Make all the calls, whatever sources raise in them; then raise the first SourceError."""
    first: SourceError | None = None
    for call in calls:
        try:
            call()
        except SourceError as error:
            first = first or error
    if first is not None:
        raise first


class Speculation:
    """All sources of one engine. `layer_ids` is the union of the features they read."""

    def __init__(
        self,
        sources: Sequence[DraftSource],
        planner: Policy,
        target: Target,
        arena: KVArena,
        needs_probs: bool = False,
        is_strict: bool = False,
    ) -> None:
        """`needs_probs`: the accept rule computes with the probabilities that drafts carry."""
        self.layer_ids = layers_read(sources, target.num_layers)
        self.sources = _with_distinct_names(sources)
        self.planner = planner
        self.rules: Rules = AllowAll()
        self.guard = Guard(is_strict)
        self.vocab_size = target.vocab_size
        self.arena = arena
        self._needs_probs = needs_probs
        self._by_name = {source.name: source for source in self.sources}
        self._said = {id(source): Fields(*fields_of(source)) for source in self.sources}
        self._num_layers = target.num_layers
        read = [(source, tuple(source.target_layer_ids)) for source in self.sources]
        self._readers = [(source, layers) for source, layers in read if layers]
        self._features = WaitingFeatures()
        self._kinds: set[str] = {""}
        self._called: set[str] = set()
        self._lengths: dict[tuple[str, str], int] = {}  # of texts when sources last saw them

    def bind(self, target: Target, tokenizer: object | None, max_num_seqs: int) -> None:
        """Introduce every source to the target; a refusal on purpose passes as it is."""
        for source in self.sources:
            self.guard.call(source, "bind", target, tokenizer, max_num_seqs)

    def check_terms(self, terms: Terms) -> None:
        """Refuse names of sources that are not here; where there are none, all is plain anyway.

        Raises:
            SamplingError: the message names the known ones.
        """
        for name in terms.sources or ():
            if self.sources and name not in self._by_name:
                raise SamplingError(
                    f"sources must be of {', '.join(self._by_name)}, got {shown(name)}"
                )

    def plan(
        self, schedule: Schedule, row_budget: int, load: LoadFacts, now: float
    ) -> tuple[StepView, list[Proposal]]:
        """What may be drafted; requests that finish their prompt in this step get no drafts."""
        self.guard.begin_step()
        proposals = [
            Proposal(
                work,
                self._ask_of(work, load, now) if self.sources else Ask(work.request.request_id, 0),
                DraftOutcome(Draft(), is_greedy=work.request.params.is_greedy),
            )
            for work in schedule.works
            if work.is_last
        ]
        context = sum(work.context_len for work in schedule.works)
        asks = [proposal.ask for proposal in proposals]
        return StepView(asks, schedule.num_rows, max(0, row_budget), context), proposals

    def propose(self, view: StepView, proposals: Sequence[Proposal]) -> float:
        """Ask the sources; seconds they took. No request and no KV is changed yet.

        Raises:
            SourceError: a source failed, and the guard is strict. No request is lost: the next
                step asks again, and requests can be aborted.
        """
        if not view.row_budget or not any(ask.room > 0 for ask in view.asks):
            return 0.0
        sources = [
            source
            for source in self.planner.order([s for s in self.sources if self._is_sound(s)])
            if any(has_needed(ask, source) for ask in view.asks)
        ]
        for source in sources:
            self._root_drafts(source, view, proposals)
        for source in sources:
            if source.can_extend:
                self._extensions(source, view, proposals)
        return view.spent

    def choose(self, view: StepView, proposals: Sequence[Proposal]) -> None:
        """Cut the proposals to what fits and pays, and reserve KV for their rows."""
        if not any(ask.drafts for ask in view.asks):
            return
        chosen = self.planner.choose(view)
        for proposal, draft in zip(proposals, chosen, strict=True):
            work, causes = proposal.work, proposal.outcome.causes
            room = self.arena.num_available(work.request.request_id) - work.num_rows
            bound = proposal.ask.allowed.num_draft_tokens
            room = room if bound is None else min(room, bound)
            draft = prefix(draft, room)  # KV that is short takes drafts before requests
            self.arena.reserve(work.request.request_id, work.num_rows + len(draft))
            proposed = max((len(each) for each in proposal.ask.drafts), default=0)
            if proposed > len(draft):
                causes["truncated_by_plan"] = proposed - len(draft)
            work.draft = proposal.outcome.draft = draft

    def observe(self, proposals: Sequence[Proposal]) -> None:
        """Tell planner and sources what the target kept.

        Raises:
            SourceError: a source failed, and the guard is strict.
        """
        by_source: dict[str, list[Outcome]] = {}
        for proposal in proposals:
            ask, outcome = proposal.ask, proposal.outcome
            if ask.room <= 0:
                continue
            self.planner.observe(ask, outcome.draft, proposal.accepted_ids)
            for draft in ask.drafts if outcome.draft.token_ids else ():
                if not draft.sources:  # else it goes on from another one
                    told = _outcome(ask.request_id, draft, outcome, proposal.accepted_ids)
                    if told.draft.token_ids:
                        by_source.setdefault(draft.source, []).append(told)
        each_and_then_raise(
            partial(self._observe_one, self._by_name[name], outcomes)
            for name, outcomes in by_source.items()
        )

    def keep_features(
        self, requests: Sequence[Request], features: torch.Tensor, counts: Sequence[int]
    ) -> None:
        """Features of newly committed tokens, until they are asked for.

        Args:
            features: [sum(counts), len(layer_ids) * hidden], request by request.
        """
        ends = list(accumulate(counts))
        for source, layers in self._readers:
            mine = features
            if layers != self.layer_ids:
                taps = features.chunk(len(self.layer_ids), dim=1)
                mine = torch.cat([taps[self.layer_ids.index(layer)] for layer in layers], dim=1)
            for request, count, end in zip(requests, counts, ends, strict=True):
                if self._may_listen(source, request):
                    self._features.add(source.name, request.request_id, mine, end - count, end)

    def _may_listen(self, source: DraftSource, request: Request) -> bool:
        """Whether a source may still ask for the features of a request."""
        if self.guard.is_out(source.name, request.request_id):
            return False
        if source.max_draft_tokens == 0:  # it never drafts, and hears of whole texts
            return True
        terms = request.terms
        is_named = terms.sources is None or source.name in terms.sources
        return is_named and terms.num_draft_tokens != 0 and request.max_tokens > 1

    def finish(self, request: Request) -> None:
        """A request came to its end: every source may learn from its whole text."""
        each_and_then_raise(
            partial(self.guard.tell, source, "finish", self._context(source, request))
            for source in self.sources
            if not self.guard.is_out(source.name, request.request_id)
        )

    def release(self, request_id: str) -> None:
        """Make every source forget a request."""
        for source in self.sources:
            self._features.drop(source.name, request_id)
            self._lengths.pop((source.name, request_id), None)
        self.planner.forget(request_id)
        self.guard.forget(request_id)
        each_and_then_raise(
            partial(self.guard.tell, source, "release", request_id) for source in self.sources
        )

    def _ask_of(self, work: Work, load: LoadFacts, now: float) -> Ask:
        request = work.request
        terms = request.terms
        room = request.draft_room if work.may_draft else 0
        if len(self._kinds) < MAX_KINDS:
            self._kinds.add(terms.kind)
        ask = Ask(request.request_id, room, len(request.tokens))
        ask.kind = terms.kind if terms.kind in self._kinds else ""
        ask.has_prediction = request.context.prediction is not None
        ask.has_grammar = request.grammar is not None
        done = request.num_output_tokens
        if terms.priority or terms.deadline is not None:
            waited = now - request.group.metrics.arrival_time
            ask.weight = weight_of(terms, waited, done, request.max_tokens - done)
        if not isinstance(self.rules, AllowAll) and room > 0:
            facts = RequestFacts(
                len(request.tokens),
                done,
                terms.tag,
                terms.kind,
                terms.priority,
                request.params.owner,
                ask.has_prediction,
            )
            ask.allowed = self.rules.restrict(facts, load)
        ask.allowed = narrowed(ask.allowed, terms)
        if ask.allowed.sources == () or ask.allowed.num_draft_tokens == 0:
            ask.room = 0
        return ask

    def _is_sound(self, source: DraftSource) -> bool:
        try:
            self._check_fields(source)
        except SourceError as error:
            self.guard.failed(source, "fields", error)
            return False
        return True

    def _check_fields(self, source: DraftSource) -> None:
        """What a source says of itself is looked at again when it changes, and put back if wrong.

        Raises:
            SourceError: it changed to what the engine cannot work with.
        """
        known = self._said[id(source)]
        try:
            said = fields_of(source)
            if said == known:
                return
            check_source(source, self._num_layers)
            if said[:2] != known[:2]:
                raise ConfigError(
                    f"{Fields._fields[:2]} must stay {known[:2]}, got {shown(said[:2])}"
                )
        except Exception as error:
            for field_name, value in zip(Fields._fields, known, strict=True):
                setattr(source, field_name, value)
            raise SourceError(f"draft source {source.name!r} changed itself: {error}") from error
        self._said[id(source)] = Fields(*said)

    def _root_drafts(
        self, source: DraftSource, view: StepView, proposals: Sequence[Proposal]
    ) -> None:
        """Ask a source to go on from the text, for those requests that the planner names."""
        budgets = self.planner.budgets(source, view)
        asked = [
            index
            for index, budget in enumerate(budgets)
            if budget > 0 and not self.guard.is_off(source.name, view.asks[index].request_id)
        ]
        if not asked:
            return
        for group in self.guard.groups(source.name, [view.asks[i].request_id for i in asked]):
            begun = perf_counter()
            chosen = [proposals[asked[i]] for i in group]
            contexts = [self._context(source, proposal.work.request) for proposal in chosen]
            limits = [budgets[asked[i]] for i in group]
            drafts = self._answers(source, view, begun, "propose", contexts, limits)
            for proposal, context, draft in zip(chosen, contexts, drafts, strict=True):
                if draft.token_ids and self._agrees(source, context, draft, proposal.outcome):
                    proposal.ask.drafts.append(self._fit(draft, proposal))

    def _extensions(
        self, source: DraftSource, view: StepView, proposals: Sequence[Proposal]
    ) -> None:
        """Ask a source to go on from the last token of another one's chain."""
        wanted = self.planner.extensions(source, view)
        asked = [
            index
            for index, (budget, _) in enumerate(wanted)
            if budget > 0 and not self.guard.is_off(source.name, view.asks[index].request_id)
        ]
        if not asked:
            return
        begun = perf_counter()
        contexts = [self._context(source, proposals[i].work.request) for i in asked]
        chains = [wanted[i][1].token_ids for i in asked]
        limits = [wanted[i][0] for i in asked]
        drafts = self._answers(source, view, begun, "extend", contexts, chains, limits)
        for index, draft in zip(asked, drafts, strict=True):
            known, _ = cut_unknown(prefix(draft, wanted[index][0]), self.vocab_size)
            if known.token_ids and not known.is_tree:
                longer = joined(wanted[index][1], known)
                view.asks[index].drafts.append(_lawful(longer, proposals[index]))

    def _answers(
        self,
        source: DraftSource,
        view: StepView,
        begun: float,
        method: str,
        *given: Sequence[Any],
    ) -> list[Draft]:
        """One draft per context, empty ones where the call failed.

        `begun`: when the engine began to get ready for it, from where seconds are counted.
        """
        contexts: Sequence[DraftContext] = given[0]
        names = [context.request_id for context in contexts]
        start = perf_counter()
        try:
            answer = self.guard.call(source, method, *given)
            called = perf_counter() - start
            self._check_fields(source)
            drafts = check_answer(
                answer, len(contexts), source.name, self.vocab_size, self._needs_probs
            )
        except SourceError as error:
            view.spent += perf_counter() - begun
            self._give_up(source, names, method, error)
            return [Draft() for _ in contexts]
        seconds = perf_counter() - begun
        view.spent += seconds
        self._judge_pace(source, contexts, called)
        name = source.name if method == "propose" else extended(source.name)
        self.planner.observe_call(name, len(contexts), seconds)
        source.cost = self.planner.call_seconds(name) if method == "propose" else source.cost
        return drafts

    def _judge_pace(
        self, source: DraftSource, contexts: Sequence[DraftContext], seconds: float
    ) -> None:
        """A source that holds everybody up is left out; its first call may warm up."""
        known = self._lengths
        keys = [(source.name, context.request_id) for context in contexts]
        lengths = [len(context.token_ids) for context in contexts]
        new = sum(lengths) - sum(known.get(key, 0) for key in keys)
        known.update(zip(keys, lengths, strict=True))
        if seconds > STALL_SECONDS + STALL_PER_TOKEN * new and source.name in self._called:
            self.guard.failed(source, "stall")
            for context in contexts:
                self.guard.pause(source, context.request_id)
        else:
            self.guard.went_well(source.name, [context.request_id for context in contexts])
        self._called.add(source.name)

    def _give_up(
        self, source: DraftSource, request_ids: Sequence[str], what: str, error: Exception | None
    ) -> None:
        """Leave a source out for these requests for a while, and let it begin them anew."""
        self.guard.failed(source, what, error)
        for request_id in request_ids:
            self.guard.pause(source, request_id)
            self._features.drop(source.name, request_id)
            self._lengths.pop((source.name, request_id), None)
            self.guard.tell(source, "release", request_id)

    def _agrees(
        self, source: DraftSource, context: DraftContext, draft: Draft, outcome: DraftOutcome
    ) -> bool:
        """Whether the KV that a source drafted from is that of the text, by its length."""
        try:
            held = self.guard.call(source, "held_tokens", context.request_id)
            self._check_fields(source)
        except SourceError as error:
            self._give_up(source, [context.request_id], "held_tokens", error)
            return False
        expected = max(0, len(context.token_ids) - source.kv_lag)
        if held is None or (isinstance(held, Integral) and held == expected):
            return True
        outcome.causes["kv_mismatch"] = outcome.causes.get("kv_mismatch", 0) + len(draft)
        error = SourceError(
            f"draft source {source.name!r} has KV of {shown(held)} tokens of a text of which it "
            f"must have {expected}"
        )
        self._give_up(source, [context.request_id], "kv_mismatch", error)
        return False

    def _observe_one(self, source: DraftSource, outcomes: Sequence[Outcome]) -> None:
        if not self.guard.tell(source, "observe", outcomes):
            for outcome in outcomes:
                self.guard.pause(source, outcome.request_id)

    def _context(self, source: DraftSource, request: Request) -> DraftContext:
        context = request.context
        context.token_ids = request.tokens.view()
        if not self._said[id(source)].target_layer_ids:
            return context
        with one_thread():
            features = self._features.take(source.name, request.request_id)
        return replace(context, features=features)

    def _fit(self, draft: Draft, proposal: Proposal) -> Draft:
        outcome = proposal.outcome
        fitting = cut_depth(draft, proposal.work.request.draft_room)
        if len(fitting) < len(draft):
            outcome.causes["length"] = len(draft) - len(fitting)
        known, dropped = cut_unknown(fitting, self.vocab_size)
        if dropped:
            outcome.unknown_depths[draft.source] = dropped
        return _lawful(known, proposal)


def _lawful(draft: Draft, proposal: Proposal) -> Draft:
    """The part of a draft that the grammar of the output allows: the rest would cost rows.

    What was drawn from probabilities stays whole: the accept rule has to see what was drawn.
    """
    request, causes = proposal.work.request, proposal.outcome.causes
    if request.grammar is None or draft.probs is not None:
        return draft
    output_ids = request.tokens.view()[request.num_prompt_tokens :]
    kept = request.grammar.lawful(output_ids, draft.token_ids, draft.parents)
    if len(kept) < len(draft):
        causes["grammar"] = causes.get("grammar", 0) + len(draft) - len(kept)
    return subset(draft, kept)


def _outcome(
    request_id: str, own: Draft, outcome: DraftOutcome, accepted_ids: list[int]
) -> Outcome:
    """What one source is told of what was submitted of its draft."""
    part = shared_part(own, outcome.draft)
    if part is outcome.draft:
        return Outcome(request_id, part, outcome.num_accepted_drafts, accepted_ids)
    accepted = min(matched(part, accepted_ids), outcome.num_accepted_drafts)
    return Outcome(request_id, part, accepted, accepted_ids[: accepted + 1])
