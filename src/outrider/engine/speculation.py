"""Asks the sources for drafts, fits them to the step, and tells the sources what became of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from outrider.checks import INT32_MAX, integer, shown
from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
from outrider.engine.answers import check_answer
from outrider.engine.drafts import cut_depth, cut_unknown, prefix
from outrider.engine.request import Request
from outrider.engine.scheduler import Work
from outrider.errors import ConfigError, OutriderError, SourceError
from outrider.policy.feedback import DraftOutcome
from outrider.policy.planner import Policy
from outrider.target.base import Target
from outrider.target.kv import KVArena


@dataclass(slots=True)
class SourcePlan:
    """How much one source may draft in this step."""

    source: DraftSource
    budgets: list[int]  # one per drafting request; 0: it is not asked


@dataclass(slots=True)
class Proposal:
    """A request that gets new tokens in this step, and what came of asking for drafts."""

    work: Work
    drafts: list[Draft]
    outcome: DraftOutcome
    accepted_ids: list[int] = field(default_factory=list)  # and the bonus token


def _check_source(source: object, num_layers: int) -> None:
    """Refuse what the engine could not work with; the source's own code was not called yet.

    Raises:
        ConfigError: the message names the source, and what was given and expected.
    """
    if isinstance(source, type) and issubclass(source, DraftSource):
        raise ConfigError(
            f"a draft source must be an instance, got the class: write {source.__name__}(...)"
        )
    if not isinstance(source, DraftSource):
        raise ConfigError(f"a draft source must be a DraftSource, got {shown(source)}")
    if not isinstance(source.name, str):
        raise ConfigError(f"the name of a draft source must be text, got {shown(source.name)}")
    what = f"of the draft source {source.name!r}"
    integer(f"max_draft_tokens {what}", source.max_draft_tokens, 0, INT32_MAX)
    if not isinstance(source.target_layer_ids, tuple | list):
        raise ConfigError(
            f"target_layer_ids {what} must be a tuple, got {shown(source.target_layer_ids)}"
        )
    for layer in source.target_layer_ids:
        integer(f"a layer in target_layer_ids {what}", layer, -1, num_layers - 1)


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
    ) -> None:
        """`needs_probs`: the accept rule computes with the probabilities that drafts carry."""
        for source in sources:
            _check_source(source, target.num_layers)
        self.sources = _with_distinct_names(sources)
        self.planner = planner
        self.vocab_size = target.vocab_size
        self.arena = arena
        self._needs_probs = needs_probs
        wanted = [layer for source in self.sources for layer in source.target_layer_ids]
        self.layer_ids = tuple(sorted(set(wanted)))
        self._by_name = {source.name: source for source in self.sources}
        self._features: dict[tuple[str, str], list[torch.Tensor]] = {}
        self._called: set[str] = set()

    def bind(self, target: Target, tokenizer: object | None, max_num_seqs: int) -> None:
        """Introduce every source to the target; a refusal on purpose passes as it is."""
        for source in self.sources:
            self._call(source, "bind", target, tokenizer, max_num_seqs)

    def plan(self, proposals: Sequence[Proposal], row_budget: int) -> list[SourcePlan]:
        """Budgets of every source; requests that finish their prompt in this step get none."""
        rooms = [
            proposal.work.request.draft_room if proposal.work.may_draft else 0
            for proposal in proposals
        ]
        if row_budget <= 0 or not any(room > 0 for room in rooms):
            return []
        plans = []
        for source in self.sources:
            asked = rooms
            if source.needs_prediction:
                asked = [
                    0 if proposal.work.request.context.prediction is None else room
                    for proposal, room in zip(proposals, rooms, strict=True)
                ]
            if any(room > 0 for room in asked):
                budgets = self.planner.budgets(source, asked, row_budget)
                if any(budgets):
                    plans.append(SourcePlan(source, budgets))
        return plans

    def propose(self, plans: Sequence[SourcePlan], proposals: Sequence[Proposal]) -> None:
        """Ask the sources; no request and no KV is changed yet.

        Raises:
            SourceError: a source raised or broke its contract. No request is lost: the next
                step asks again, and requests can be aborted.
        """
        for plan in plans:
            asked = [index for index, budget in enumerate(plan.budgets) if budget > 0]
            contexts = [
                self._context(plan.source, proposals[index].work.request) for index in asked
            ]
            drafts = self._ask(plan.source, contexts, [plan.budgets[index] for index in asked])
            for index, draft in zip(asked, drafts, strict=True):
                if draft.token_ids:
                    proposals[index].drafts.append(draft)

    def choose(self, proposals: Sequence[Proposal], num_rows: int, row_budget: int) -> None:
        """Cut the proposals to what fits and pays, and reserve KV for their rows."""
        if not any(proposal.drafts for proposal in proposals):
            return
        for proposal in proposals:
            proposal.drafts = [self._fit(draft, proposal) for draft in proposal.drafts]
        candidates = [proposal.drafts for proposal in proposals]
        chosen = self.planner.choose(candidates, num_rows, row_budget)
        for proposal, draft in zip(proposals, chosen, strict=True):
            work, causes = proposal.work, proposal.outcome.causes
            room = self.arena.num_available(work.request.request_id) - work.num_rows
            draft = prefix(draft, room)  # KV that is short takes drafts before requests
            self.arena.reserve(work.request.request_id, work.num_rows + len(draft))
            proposed = max((len(each) for each in proposal.drafts), default=0)
            if proposed > len(draft):
                causes["truncated_by_plan"] = proposed - len(draft)
            work.draft = proposal.outcome.draft = draft

    def observe(self, proposals: Sequence[Proposal]) -> None:
        """Tell planner and sources what the target kept."""
        by_source: dict[str, list[Outcome]] = {}
        for proposal in proposals:
            draft, kept = proposal.outcome.draft, proposal.outcome.num_accepted_drafts
            if draft.token_ids:
                request_id = proposal.work.request.request_id
                told = Outcome(request_id, draft, kept, proposal.accepted_ids)
                by_source.setdefault(draft.source, []).append(told)
                self.planner.observe(draft.source, draft, kept)
        for name, outcomes in by_source.items():
            total = sum(outcome.num_accepted_drafts for outcome in outcomes)
            self.planner.observe_call(name, total)
        each_and_then_raise(
            partial(self._call, self._by_name[name], "observe", outcomes)
            for name, outcomes in by_source.items()
        )

    def keep_features(self, request_id: str, features: torch.Tensor) -> None:
        """Features of newly committed tokens, [m, len(layer_ids) * hidden], until asked for."""
        width = features.shape[1] // len(self.layer_ids)
        for source in self.sources:
            if source.target_layer_ids:
                places = [self.layer_ids.index(layer) for layer in source.target_layer_ids]
                taps = [features[:, place * width : (place + 1) * width] for place in places]
                whole = tuple(source.target_layer_ids) == self.layer_ids
                mine = features if whole else torch.cat(taps, dim=1)
                self._features.setdefault((source.name, request_id), []).append(mine)

    def finish(self, request: Request) -> None:
        """A request came to its end: every source may learn from its whole text."""
        each_and_then_raise(
            partial(self._call, source, "finish", self._context(source, request))
            for source in self.sources
        )

    def release(self, request_id: str) -> None:
        """Make every source forget a request."""
        for source in self.sources:
            self._features.pop((source.name, request_id), None)
        each_and_then_raise(
            partial(self._call, source, "release", request_id) for source in self.sources
        )

    def _context(self, source: DraftSource, request: Request) -> DraftContext:
        context = request.context
        context.token_ids = request.tokens.view()
        if not source.target_layer_ids:
            return context
        pending = self._features.pop((source.name, request.request_id), [])
        return replace(context, features=torch.cat(pending) if pending else None)

    def _ask(
        self, source: DraftSource, contexts: list[DraftContext], budgets: list[int]
    ) -> list[Draft]:
        start = perf_counter()
        drafts = self._call(source, "propose", contexts, budgets)
        self._measure(source, perf_counter() - start)
        return check_answer(drafts, len(contexts), source.name, self.vocab_size, self._needs_probs)

    def _measure(self, source: DraftSource, seconds: float) -> None:
        """Running mean of seconds per call; the first call, which may warm up, does not count."""
        if source.name not in self._called:
            self._called.add(source.name)
        elif source.cost == 0.0:
            source.cost = seconds
        else:
            source.cost += 0.1 * (min(seconds, 3 * source.cost) - source.cost)

    def _fit(self, draft: Draft, proposal: Proposal) -> Draft:
        outcome = proposal.outcome
        fitting = cut_depth(draft, proposal.work.request.draft_room)
        if len(fitting) < len(draft):
            outcome.causes["length"] = len(draft) - len(fitting)
        known, dropped = cut_unknown(fitting, self.vocab_size)
        if dropped:
            outcome.unknown_depths, outcome.unknown_source = dropped, draft.source
        return known

    @staticmethod
    def _call(source: DraftSource, method: str, *arguments: Any) -> Any:
        call: Callable[..., Any] = getattr(source, method)
        try:
            return call(*arguments)
        except Exception as error:
            if method == "bind" and isinstance(error, OutriderError):
                raise
            raise SourceError(
                f"draft source {source.name!r} raised in {method}: {type(error).__name__}: {error}"
            ) from error
