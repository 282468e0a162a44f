"""What a plan is made of: the requests of a step as the planner sees them. No tensor, no queue."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.drafting.source import Draft, DraftSource
from outrider.policy.restrict import EVERYTHING, Allowed
from outrider.terms import Terms


@dataclass(slots=True)
class Ask:
    """One request that gets a new token in this step."""

    request_id: str
    room: int  # longest draft that can be of use; 0: it does not draft
    length: int = 0  # tokens of its text
    kind: str = ""
    weight: float = 1.0  # of its tokens, next to those of others
    allowed: Allowed = EVERYTHING
    has_prediction: bool = False
    has_grammar: bool = False
    drafts: list[Draft] = field(default_factory=list)  # proposed so far, in the order of asking


@dataclass(slots=True)
class StepView:
    """One step before its forward."""

    asks: list[Ask]
    num_rows: int  # of text, prompts included
    row_budget: int  # rows that drafts may add
    context: int = 0  # tokens of KV that the forward reads
    spent: float = 0.0  # seconds that sources have taken for this step so far


class Policy(Protocol):
    """What the engine asks of a plan, in this order; `Planner` is the default."""

    def order(self, sources: Sequence[DraftSource]) -> Sequence[DraftSource]:
        """In which order sources are asked: later ones see what earlier ones said."""
        ...

    def budgets(self, source: DraftSource, view: StepView) -> list[int]:
        """Most tokens that a source may draft for each ask; 0: it is not asked."""
        ...

    def extensions(self, source: DraftSource, view: StepView) -> list[tuple[int, Draft]]:
        """For each ask a chain, and how many tokens may follow it; 0: none. Empty: for no ask."""
        ...

    def choose(self, view: StepView) -> list[Draft]:
        """What is submitted for each ask: of its drafts one, some in one tree, or nothing."""
        ...

    def observe(self, ask: Ask, submitted: Draft, true_ids: Sequence[int]) -> None:
        """What a request's text went on with: the accepted tokens and the target's own."""
        ...

    def observe_call(self, name: str, num_requests: int, seconds: float) -> None:
        """A source was asked for so many requests; "name+": to go on from others' drafts."""
        ...

    def call_seconds(self, name: str) -> float:
        """What such a call takes for one request; 0 before one was seen."""
        ...

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        ...


def has_needed(ask: Ask, source: DraftSource) -> bool:
    """Whether a request has what a source drafts from."""
    return (ask.has_prediction or not source.needs_prediction) and (
        ask.has_grammar or not source.needs_grammar
    )


def cap(ask: Ask, source: DraftSource) -> int:
    """Most tokens that terms, rules and the source itself leave for a request."""
    if ask.room <= 0 or not ask.allowed.allows(source.name) or not has_needed(ask, source):
        return 0
    most = min(ask.room, source.max_draft_tokens)
    bound = ask.allowed.num_draft_tokens
    return most if bound is None else min(most, bound)


def narrowed(allowed: Allowed, terms: Terms) -> Allowed:
    """What rules and the terms of a request leave together."""
    if terms.sources is None and terms.num_draft_tokens is None:
        return allowed
    sources = allowed.sources
    if terms.sources is not None:
        sources = tuple(name for name in terms.sources if allowed.allows(name))
    bounds = [b for b in (allowed.num_draft_tokens, terms.num_draft_tokens) if b is not None]
    return Allowed(sources, min(bounds, default=None), allowed.forbidden)
