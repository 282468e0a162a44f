"""Decides how many tokens each source may draft and which of them go to the target.

The measure is tokens per second: a draft token adds its chance to survive (the product of the
confidences down to it) to the tokens of a step, and a row to its cost. Draft tokens of all
requests are taken in falling order of that chance while the ratio grows. Speculation that does
not pay is not done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.drafting.source import Draft, DraftSource
from outrider.engine.drafts import prefix, subset
from outrider.policy.cost import CostModel

DEFAULT_CONFIDENCE = 0.5  # of a source that gives none, before anything was observed
EXPLORE_EVERY = 64  # one step in so many goes beyond what pays, so that estimates stay alive
PRIOR_WEIGHT = 4.0  # expected tokens before observations outweigh a source's own confidence
MEMORY = 200.0  # expected tokens after which older observations fade


class Policy(Protocol):
    """What the engine asks of a plan; `Planner` is the default."""

    def budgets(self, source: DraftSource, rooms: Sequence[int], row_budget: int) -> list[int]: ...

    def choose(
        self, proposals: Sequence[Sequence[Draft]], num_rows: int, row_budget: int
    ) -> list[Draft]: ...

    def observe(self, source_name: str, draft: Draft, num_accepted_drafts: int) -> None: ...

    def observe_call(self, source_name: str, num_accepted_drafts: int) -> None: ...


@dataclass(slots=True)
class _Record:
    """How a source's drafts fared against its own expectation."""

    expected: float = PRIOR_WEIGHT
    accepted: float = PRIOR_WEIGHT
    gain: float = 1.0  # running mean of accepted drafts per call
    skipped: int = 0  # steps in which it was not asked

    @property
    def trust(self) -> float:
        return self.accepted / self.expected


class Planner:
    """The engine asks `budgets` before proposing and `choose` after it."""

    def __init__(self, cost: CostModel, is_biased_rule: bool = False) -> None:
        """`is_biased_rule`: the accept rule is lossless only if the choice of draft tokens does
        not depend on themselves or on what follows them (all rules but the matching one)."""
        self.cost = cost
        self._is_biased_rule = is_biased_rule
        self._records: dict[str, _Record] = {}
        self._steps = 0

    def budgets(self, source: DraftSource, rooms: Sequence[int], row_budget: int) -> list[int]:
        """Most tokens to draft for each request, given how many could be of use to it."""
        record = self._record(source.name)
        curve = self.cost.curve()
        step_seconds = curve[min(len(rooms), len(curve) - 1)]
        if source.cost * len(rooms) > record.gain * step_seconds:
            record.skipped += 1
            if record.skipped % EXPLORE_EVERY:
                return [0] * len(rooms)
        most = min(source.max_draft_tokens, row_budget)
        return [max(0, min(room, most)) for room in rooms]

    def choose(
        self, proposals: Sequence[Sequence[Draft]], num_rows: int, row_budget: int
    ) -> list[Draft]:
        """One draft per request, cut to what pays in a forward of `num_rows` text rows."""
        self._steps += 1
        if self._is_biased_rule:
            return self._choose_in_order(proposals, num_rows, row_budget)
        best: list[Draft] = []
        chances: list[list[float]] = []
        for drafts in proposals:
            scored = [(self._survival(draft), draft) for draft in drafts]
            chance, draft = max(scored, key=lambda pair: sum(pair[0]), default=([], Draft()))
            best.append(draft)
            chances.append(chance)
        flat = [chance for row in chances for chance in row]
        if not flat:
            return best
        threshold = self._threshold(flat, len(proposals), num_rows, row_budget)
        return _cut(best, chances, threshold, row_budget)

    def observe(self, source_name: str, draft: Draft, num_accepted_drafts: int) -> None:
        """What the accept rule kept of a submitted draft."""
        record = self._record(source_name)
        fade = min(1.0, MEMORY / record.expected)
        record.expected = fade * record.expected + sum(_products(draft))
        record.accepted = fade * record.accepted + num_accepted_drafts

    def observe_call(self, source_name: str, num_accepted_drafts: int) -> None:
        """How many tokens one call of a source brought to all its requests together."""
        record = self._record(source_name)
        record.gain += 0.1 * (num_accepted_drafts - record.gain)

    def _record(self, source_name: str) -> _Record:
        record = self._records.get(source_name)
        if record is None:
            record = self._records[source_name] = _Record()
        return record

    def _survival(self, draft: Draft) -> list[float]:
        trust = min(1.0, self._record(draft.source).trust)
        return [trust * chance for chance in _products(draft)]

    def _threshold(
        self, chances: list[float], num_requests: int, num_rows: int, row_budget: int
    ) -> float:
        """Smallest chance worth a row: the one at which tokens per second are highest."""
        falling = sorted(chances, reverse=True)[:row_budget]
        seconds = self.cost.curve()[num_rows : num_rows + len(falling) + 1]
        tokens, count = float(num_requests), 0
        best = tokens / seconds[0]
        for i, (chance, cost) in enumerate(zip(falling, seconds[1:], strict=False), 1):
            tokens += chance
            if tokens / cost > best:
                best, count = tokens / cost, i
        if self._steps % EXPLORE_EVERY == 0:
            count = min(len(falling), max(count + 4, 2 * count))
        return falling[count - 1] if count else 2.0

    def _choose_in_order(
        self, proposals: Sequence[Sequence[Draft]], num_rows: int, row_budget: int
    ) -> list[Draft]:
        """The first source that has something, up to where its earlier tokens survive enough."""
        curve = self.cost.curve()
        last = len(curve) - 1
        row = (curve[min(num_rows + 8, last)] - curve[min(num_rows, last)]) / 8
        threshold = row * max(1, len(proposals)) / curve[min(num_rows, last)]
        chosen = []
        for drafts in proposals:
            draft = next((draft for draft in drafts if draft.token_ids), Draft())
            products = _products(draft)
            parents = draft.parents or range(-1, len(draft) - 1)
            kept = [
                i for i, parent in enumerate(parents) if parent < 0 or products[parent] >= threshold
            ][:row_budget]
            row_budget -= len(kept)
            chosen.append(subset(draft, kept))
        return chosen


def _products(draft: Draft) -> list[float]:
    """Chance of every token that it and all before it on its path are accepted."""
    confidence = draft.confidence or [DEFAULT_CONFIDENCE] * len(draft)
    products: list[float] = []
    if not draft.is_tree:
        chance = 1.0
        for value in confidence:
            chance *= min(1.0, value)
            products.append(chance)
        return products
    for value, parent in zip(confidence, draft.parents, strict=True):
        products.append(min(1.0, value) * (products[parent] if parent >= 0 else 1.0))
    return products


def _cut(
    drafts: list[Draft], chances: list[list[float]], threshold: float, row_budget: int
) -> list[Draft]:
    cut = []
    for draft, chance in zip(drafts, chances, strict=True):
        if draft.is_tree:
            kept = subset(draft, [i for i, value in enumerate(chance) if value >= threshold])
        else:
            kept = prefix(draft, sum(value >= threshold for value in chance))
        kept = prefix(kept, row_budget)
        row_budget -= len(kept)
        cut.append(kept)
    return cut
