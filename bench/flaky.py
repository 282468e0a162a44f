"""A draft source that is often wrong and now and then crashes, for the soak."""

import random
from collections.abc import Sequence

from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome


class Flaky(DraftSource):
    """Drafts tokens of the text at random; every `every`-th call of a method fails."""

    name = "flaky"
    max_draft_tokens = 3

    def __init__(self, every: int = 40) -> None:
        self._every = every
        self._random = random.Random(1)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft]:
        self._stumble()
        choose = self._random.choices
        return [
            Draft(choose(context.token_ids.tolist(), k=min(budget, self.max_draft_tokens)))
            for context, budget in zip(contexts, budgets, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._stumble()

    def release(self, request_id: str) -> None:
        self._stumble()

    def _stumble(self) -> None:
        if self._random.randrange(self._every) == 0:
            raise RuntimeError("a source that crashes")
