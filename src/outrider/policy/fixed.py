"""Drafts of one length, whatever they cost: for measuring what a source would be accepted."""

from collections.abc import Sequence

from outrider.drafting.source import Draft, DraftSource
from outrider.engine.drafts import prefix
from outrider.policy.view import Ask, StepView, cap


class FixedLength:
    """A Policy that asks every source for the same number of tokens and submits all of them.

    Of several sources the first that has something is submitted, and nothing is learnt. With rules
    beside it (`Speculation.rules`) it is the planner that goes by rules alone.

    Args:
        num_draft_tokens: None: as many as the source makes at most.
    """

    def __init__(self, num_draft_tokens: int | None = None) -> None:
        self._length = num_draft_tokens

    def order(self, sources: Sequence[DraftSource]) -> Sequence[DraftSource]:
        return sources

    def budgets(self, source: DraftSource, view: StepView) -> list[int]:
        most = source.max_draft_tokens if self._length is None else self._length
        share = view.row_budget // max(1, sum(ask.room > 0 for ask in view.asks))
        return [max(0, min(cap(ask, source), most, share)) for ask in view.asks]

    def extensions(self, source: DraftSource, view: StepView) -> list[tuple[int, Draft]]:
        return []

    def choose(self, view: StepView) -> list[Draft]:
        """The first source that has something."""
        chosen = []
        left = view.row_budget
        for ask in view.asks:
            draft = prefix(next((d for d in ask.drafts if d.token_ids), Draft()), left)
            left -= len(draft)
            chosen.append(draft)
        return chosen

    def observe(self, ask: Ask, submitted: Draft, true_ids: Sequence[int]) -> None:
        pass

    def observe_call(self, name: str, num_requests: int, seconds: float) -> None:
        pass

    def call_seconds(self, name: str) -> float:
        return 0.0

    def forget(self, request_id: str) -> None:
        pass
