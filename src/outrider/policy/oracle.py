"""A plan that knows how each text goes on: what any plan could reach with the sources of a trace.

It submits the tokens that are right and no others, and has a source drafted from where that brings
more tokens than decoding makes meanwhile. Between it and plain decoding lies all that planning can
do; what a real plan lacks of it is the price of not knowing.
"""

from collections.abc import Mapping

from outrider.drafting.source import Draft, DraftSource
from outrider.engine.drafts import matched
from outrider.policy.cost import CostModel
from outrider.policy.fixed import FixedLength
from outrider.policy.traces import CallSeconds, RequestTrace
from outrider.policy.view import Ask, StepView, cap


class Oracle(FixedLength):
    """A Policy for simulations only.

    Args:
        cost: knows what forwards take.
        requests: by the id under which each is decoded.
        calls: what calls take by source; text that is new to one is not reckoned with.
    """

    def __init__(
        self,
        cost: CostModel,
        requests: Mapping[str, RequestTrace],
        calls: Mapping[str, CallSeconds],
    ) -> None:
        super().__init__()
        self._cost, self._requests, self._calls = cost, requests, calls
        self._tokens, self._seconds = 0.0, 0.0

    def budgets(self, source: DraftSource, view: StepView) -> list[int]:
        """All requests whose tokens pay for the call together."""
        base, each, _ = self._calls.get(source.name, CallSeconds())
        curve = self._cost.curve(view.context)
        known = [len(self._known(ask)) for ask in view.asks]
        rows = view.num_rows + sum(known)
        rate = self._tokens / self._seconds if self._seconds else len(view.asks) / curve[rows]
        worth = []
        for ask, count in zip(view.asks, known, strict=True):
            new = max(0, len(self._right(ask, source.name)) - count)
            more = curve[min(rows + new, self._cost.max_rows)] - curve[rows]
            worth.append(new - rate * (each + more))
        if sum(value for value in worth if value > 0) <= rate * base:
            return [0] * len(worth)
        return [
            cap(ask, source) if value > 0 else 0
            for ask, value in zip(view.asks, worth, strict=True)
        ]

    def choose(self, view: StepView) -> list[Draft]:
        """What is right of the best draft of each request, and nothing else."""
        chosen, left = [], view.row_budget
        for ask in view.asks:
            chosen.append(Draft(self._known(ask)[:left], source="oracle"))
            left -= len(chosen[-1])
        drafted = view.row_budget - left
        self._tokens += len(view.asks) + drafted
        self._seconds += self._cost.curve(view.context)[view.num_rows + drafted] + view.spent
        return chosen

    def _known(self, ask: Ask) -> list[int]:
        """The right tokens that drafts of this step have brought so far."""
        rights = [self._right(ask, draft.source) for draft in ask.drafts]
        return max(rights, key=len, default=[])

    def _right(self, ask: Ask, name: str) -> list[int]:
        """The right tokens that a source says, or would say, of a request."""
        request = self._requests[ask.request_id]
        place = ask.length - request.num_prompt_tokens
        draft = request.drafts[place].get(name)
        if draft is None:
            return []
        rest = request.token_ids[place : place + ask.room]
        return rest[: matched(draft, rest)]
