"""Why a step submitted these draft tokens and no others, for metrics and for people who look on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.drafting.source import Draft
from outrider.engine.drafts import depths
from outrider.policy.view import StepView


@dataclass(frozen=True, slots=True)
class Considered:
    """One proposal that a plan looked at."""

    source: str  # "a+b": b goes on from a's last token
    num_tokens: int
    expected: float  # accepted tokens, if it were submitted alone and whole


@dataclass(frozen=True, slots=True)
class Choice:
    """What became of a request's proposals in one step, and what was expected of them."""

    request_id: str
    considered: tuple[Considered, ...]
    chosen: dict[str, int]  # tokens submitted, by source
    shape: str  # "none", "one" source, a "chain" of several, or a "tree"
    expected: float  # accepted tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """One step's plan."""

    step: int
    asked: dict[str, int]  # source -> requests it was asked for; "b+": to go on from others' drafts
    choices: tuple[Choice, ...]
    num_rows: int  # of text, prompts included
    plain_seconds: float  # of a forward without drafts, …
    expected_seconds: float  # … and with those that were chosen
    draft_seconds: float  # that the sources took
    plain_tokens: float  # one per request, times its weight
    expected_tokens: float

    @property
    def expected_speedup(self) -> float:
        """Tokens per second with the drafts chosen, over those without."""
        plain = self.plain_tokens / self.plain_seconds
        return self.expected_tokens / (self.expected_seconds + self.draft_seconds) / plain

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"expected_speedup": self.expected_speedup}


@dataclass(slots=True)
class Plan:
    """What a decision is told from when somebody asks: a step costs no more than keeping it."""

    step: int
    view: StepView
    asked: Mapping[str, int]
    chances: Mapping[int, Sequence[float]]  # of the proposals, by identity
    chosen: Sequence[Draft] = ()
    survival: Sequence[Sequence[float]] = ()  # of the merged proposals, before they were cut
    seconds: Sequence[float] = field(default_factory=list)  # by draft rows

    def decision(self) -> Decision:
        view = self.view
        choices = tuple(
            self._choice(i, draft) for i, draft in enumerate(self.chosen) if view.asks[i].room > 0
        )
        rows = sum(map(len, self.chosen))
        plain = sum(ask.weight for ask in view.asks)
        gained = sum(
            view.asks[i].weight * self._expected(i, draft) for i, draft in enumerate(self.chosen)
        )
        return Decision(
            self.step,
            dict(self.asked),
            choices,
            view.num_rows,
            self.seconds[0],
            self.seconds[min(rows, len(self.seconds) - 1)],
            view.spent,
            plain,
            plain + gained,
        )

    def _choice(self, index: int, draft: Draft) -> Choice:
        ask = self.view.asks[index]
        considered = tuple(
            Considered(
                "+".join(dict.fromkeys(each.sources or [each.source])),
                len(each),
                sum(self.chances.get(id(each), ())),
            )
            for each in ask.drafts
        )
        names = [draft.source_of(i) for i in range(len(draft))]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        return Choice(
            ask.request_id, considered, counts, shape(draft), self._expected(index, draft)
        )

    def _expected(self, index: int, draft: Draft) -> float:
        return sum(sorted(self.survival[index], reverse=True)[: len(draft)])


def shape(draft: Draft) -> str:
    """How a submitted draft is made of what was proposed."""
    if not draft.token_ids:
        return "none"
    if draft.is_tree and max(depths(draft)) < len(draft):
        return "tree"
    return "chain" if len(set(draft.sources)) > 1 else "one"
