"""Drafts of one length, whatever they cost: for measuring what a source would be accepted."""

from collections.abc import Sequence

from outrider.drafting.source import Draft, DraftSource
from outrider.engine.drafts import prefix


class FixedLength:
    """A Policy that asks every source for the same number of tokens and submits all of them.

    Args:
        num_draft_tokens: None: as many as the source makes at most.
    """

    def __init__(self, num_draft_tokens: int | None = None) -> None:
        self._length = num_draft_tokens

    def budgets(self, source: DraftSource, rooms: Sequence[int], row_budget: int) -> list[int]:
        most = source.max_draft_tokens
        if self._length is not None:
            most = min(most, self._length)
        share = row_budget // max(1, sum(room > 0 for room in rooms))
        return [max(0, min(room, most, share)) for room in rooms]

    def choose(
        self, proposals: Sequence[Sequence[Draft]], num_rows: int, row_budget: int
    ) -> list[Draft]:
        """The first source that has something."""
        chosen = []
        for drafts in proposals:
            draft = prefix(next((d for d in drafts if d.token_ids), Draft()), row_budget)
            row_budget -= len(draft)
            chosen.append(draft)
        return chosen

    def observe(self, source_name: str, draft: Draft, num_accepted_drafts: int) -> None:
        """Nothing is learnt."""

    def observe_call(self, source_name: str, num_accepted_drafts: int) -> None:
        """Nothing is learnt."""
