"""Decides who drafts how much for each request, and which draft tokens go to the target.

The measure is tokens per second. A draft token adds its chance to survive (the product of the
calibrated confidences down to it) times the weight of its request to the tokens of a step, and a
row to its seconds. Draft tokens of all requests are taken in falling order of that product while
the ratio grows. Whether to ask a source is the same question with the seconds of its call added.
Speculation that does not pay is not done.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.source import Draft, DraftSource
from outrider.engine.drafts import matched, prefix, straightened, subset
from outrider.engine.merging import merge
from outrider.policy.calibration import Calibration, extended
from outrider.policy.cost import CostModel
from outrider.policy.decisions import Decision, Plan
from outrider.policy.gains import SourceGain, bucket
from outrider.policy.view import Ask, StepView, cap

EXPLORE_EVERY = 64  # one step in so many goes beyond what pays, so that estimates stay alive
FLOOR = 0.01  # a token this unlikely is never worth a row
PROBES = (1, 1, 2, 4)  # requests in the first calls of a source; the very first may warm up
CHEAP = 0.01  # of a step: a source that takes less is asked without a second thought
# So much more tokens per second a source has to promise to be asked, one that was not asked in the
# last step and one that was: estimates move a little in every step, and the best of many are best
# by luck as well.
TO_BEGIN, TO_GO_ON = 1.03, 1.01
KEPT_DECISIONS = 256


@dataclass(slots=True)
class _Asked:
    """That a source was asked for a request in this step."""

    name: str
    place: int  # bucket of what was expected without it
    before: list[Draft]  # of the request, without it


@dataclass(slots=True)
class _Step:
    """What the planner has to remember of a step until its outcome is known."""

    asked: dict[str, list[_Asked]] = field(default_factory=dict)  # by request
    counts: dict[str, int] = field(default_factory=dict)  # source -> requests
    new_tokens: dict[str, int] = field(default_factory=dict)  # source -> text it has to take in
    chances: dict[int, list[float]] = field(default_factory=dict)  # by identity of the draft
    threshold: float = 0.0  # worth of a token that pays, as guessed before all are proposed


class Planner:
    """A `Policy` by what pays."""

    def __init__(self, cost: CostModel, is_biased_rule: bool = False) -> None:
        """`is_biased_rule`: the accept rule is lossless only if the choice of draft tokens does
        not depend on themselves or on what follows them (all rules but the matching one)."""
        self.cost = cost
        self.calibration = Calibration()
        self.gains: dict[str, SourceGain] = {}
        self._plans: deque[Plan] = deque(maxlen=KEPT_DECISIONS)
        self._is_biased_rule = is_biased_rule
        self._num_steps = 0
        self._order: Sequence[DraftSource] = ()
        self._view: StepView | None = None
        self._step = _Step()

    @property
    def decisions(self) -> list[Decision]:
        """The newest steps that had drafts, oldest first, and why they chose what they chose."""
        return self.decisions_after(0, KEPT_DECISIONS)

    def decisions_after(self, step: int, most: int) -> list[Decision]:
        """Those of them behind a step, the newest `most`; 40 µs each with 16 requests."""
        plans = [plan for plan in self._plans if plan.step > step]
        return [plan.decision() for plan in plans[-most:]]

    def order(self, sources: Sequence[DraftSource]) -> Sequence[DraftSource]:
        """Those that cost next to nothing as they were given, then the others, cheap ones first."""
        if self._is_biased_rule or len(sources) < 2:
            return sources
        if self._num_steps % EXPLORE_EVERY == 0 or len(self._order) != len(sources):
            least = CHEAP * self.cost.seconds(1, 1)[0]
            costs = {source.name: self.call_seconds(source.name) for source in sources}
            self._order = sorted(sources, key=lambda s: costs[s.name] * (costs[s.name] > least))
        return self._order

    def budgets(self, source: DraftSource, view: StepView) -> list[int]:
        """Most tokens to draft for each request; 0 where asking would not pay."""
        self._begin(view)
        most = [min(cap(ask, source), view.row_budget) for ask in view.asks]
        able = [index for index, tokens in enumerate(most) if tokens > 0]
        if not able:
            return [0] * len(most)
        chosen = self._worth_asking(source.name, able, view)
        return [tokens if index in chosen else 0 for index, tokens in enumerate(most)]

    def extensions(self, source: DraftSource, view: StepView) -> list[tuple[int, Draft]]:
        """Where a chain of another source ends so surely that more of it would pay."""
        nothing = [(0, Draft())] * len(view.asks)
        if self._is_biased_rule or not view.row_budget:
            return nothing
        self._begin(view)
        threshold = self._usual_threshold(view)
        found: dict[int, tuple[int, Draft]] = {}
        for index, ask in enumerate(view.asks):
            chains = [d for d in ask.drafts if d.token_ids and not d.is_tree]
            if not chains or not cap(ask, source):
                continue
            base = max(chains, key=lambda draft: sum(self._chances(draft, ask)))
            chances = self._chances(base, ask)
            bound = ask.allowed.num_draft_tokens
            room = min(cap(ask, source), (bound or ask.room) - len(base), ask.room - len(base))
            is_sure = len(chances) == len(base) and chances[-1] * ask.weight > threshold
            if is_sure and room > 0 and source.name not in (base.source, *base.sources):
                found[index] = (room, base)
        if not found:
            return nothing
        chosen = self._worth_asking(extended(source.name), list(found), view)
        return [found[i] if i in chosen else (0, Draft()) for i in range(len(view.asks))]

    def choose(self, view: StepView) -> list[Draft]:
        """One draft per request, merged and cut to what pays."""
        self._begin(view)
        self._num_steps += 1
        self._view = None
        if self._is_biased_rule:
            return self._choose_in_order(view)
        merged: list[Draft] = []
        chances: list[list[float]] = []
        for ask in view.asks:
            draft, chance = self._merged(ask)
            merged.append(draft)
            chances.append(chance)
        threshold, seconds = self._threshold(view, chances)
        chosen = _cut(view, merged, chances, threshold)
        if any(ask.drafts for ask in view.asks):
            plan = Plan(self._num_steps, view, self._step.counts, self._step.chances)
            plan.chosen, plan.survival, plan.seconds = chosen, chances, seconds
            self._plans.append(plan)
        return chosen

    def observe(self, ask: Ask, submitted: Draft, true_ids: Sequence[int]) -> None:
        """Learn how right every proposal was, and what asking for it brought."""
        for draft in ask.drafts:
            if draft.token_ids:
                self.calibration.observe(draft, ask.kind, true_ids)
        num_accepted = min(len(true_ids) - 1, matched(submitted, true_ids))
        for asked in self._step.asked.pop(ask.request_id, ()):
            before = max((matched(draft, true_ids) for draft in asked.before), default=0)
            brought = max(0, num_accepted - before)
            rows = _num_rows(submitted, asked.name)
            gain = self._gain(asked.name)
            gain.observe(ask.kind, ask.request_id, asked.place, brought, rows)

    def observe_call(self, name: str, num_requests: int, seconds: float) -> None:
        """A call was made; what it brought is told by `observe`."""
        self._gain(name).cost.observe(num_requests, seconds, self._step.new_tokens.get(name, 0))

    def call_seconds(self, name: str) -> float:
        return self._gain(name).cost.seconds(1)

    def forget(self, request_id: str) -> None:
        for gain in self.gains.values():
            gain.forget(request_id)

    def _begin(self, view: StepView) -> None:
        if self._view is not view:
            self._view, self._step = view, _Step()

    def _gain(self, name: str) -> SourceGain:
        gain = self.gains.get(name)
        if gain is None:
            gain = self.gains[name] = SourceGain()
        return gain

    def _chances(self, draft: Draft, ask: Ask) -> list[float]:
        chances = self._step.chances.get(id(draft))
        if chances is None:
            chances = self.calibration.chances(draft, ask.kind, FLOOR)
            self._step.chances[id(draft)] = chances
        return chances

    def _expected(self, ask: Ask) -> float:
        """Accepted tokens that the drafts so far promise, the best of them alone."""
        return max((sum(self._chances(d, ask)) for d in ask.drafts if d.token_ids), default=0.0)

    def _worth_asking(self, name: str, able: Sequence[int], view: StepView) -> set[int]:
        """Requests for which a source is asked: those that raise tokens per second together."""
        gain = self._gain(name)
        plain = self.cost.seconds(view.num_rows, view.num_rows, view.context)[0]
        # Under a biased rule what is proposed has no say in who else is asked.
        expected = [0.0 if self._is_biased_rule else self._expected(ask) for ask in view.asks]
        if gain.cost.num_calls < len(PROBES):  # nobody knows what it costs
            chosen = set(able[: PROBES[gain.cost.num_calls]])
        elif gain.cost.seconds(len(able)) < CHEAP * plain:
            chosen = set(able)
        else:
            chosen = self._paying(gain, able, view, expected)
        gain.is_on = bool(chosen)
        if gain.is_due(bool(chosen), EXPLORE_EVERY):
            chosen = {able[self._num_steps % len(able)]}
        self._step.counts[name] = len(chosen)
        self._step.new_tokens[name] = sum(gain.take(view.asks[index]) for index in chosen)
        for index in chosen:
            ask = view.asks[index]
            asked = _Asked(name, bucket(expected[index]), list(ask.drafts))
            self._step.asked.setdefault(ask.request_id, []).append(asked)
        return chosen

    def _paying(
        self, gain: SourceGain, able: Sequence[int], view: StepView, expected: Sequence[float]
    ) -> set[int]:
        asks = view.asks
        worth = {
            index: asks[index].weight
            * gain.expect(asks[index].kind, asks[index].request_id, bucket(expected[index]))
            for index in able
        }
        falling = sorted(able, key=lambda index: -worth[index])
        late = 0.0  # seconds to take in texts
        # Rows that the drafts so far will add: about as many as the tokens they promise.
        rows = min(view.row_budget, round(1.5 * sum(expected)))
        first = view.num_rows + rows
        last = first + round(gain.rows * len(falling))
        curve = self.cost.seconds(first, last, view.context)
        tokens = sum(ask.weight * (1.0 + value) for ask, value in zip(asks, expected, strict=True))
        best = tokens / (curve[0] + view.spent) * (TO_GO_ON if gain.is_on else TO_BEGIN)
        count = 0
        for number, index in enumerate(falling, 1):
            tokens += worth[index]
            late += gain.intake_seconds(asks[index])
            added = min(len(curve) - 1, round(gain.rows * number))
            rate = tokens / (curve[added] + view.spent + gain.cost.seconds(number) + late)
            if rate > best:
                best, count = rate, number
        return set(falling[:count])

    def _merged(self, ask: Ask) -> tuple[Draft, list[float]]:
        drafts = [draft for draft in ask.drafts if draft.token_ids]
        if not drafts:
            return Draft(), []
        return merge(drafts, [self._chances(draft, ask) for draft in drafts])

    def _threshold(
        self, view: StepView, chances: Sequence[Sequence[float]]
    ) -> tuple[float, list[float]]:
        """Smallest worth of a token that pays for its row, and the seconds of each row count."""
        worth = [
            ask.weight * chance
            for ask, row in zip(view.asks, chances, strict=True)
            for chance in row
        ]
        worth.sort(reverse=True)
        del worth[view.row_budget :]
        first = view.num_rows
        seconds = self.cost.seconds(first, first + len(worth), view.context)
        tokens = sum(ask.weight for ask in view.asks)
        spent, count = view.spent, 0
        best = tokens / (seconds[0] + spent)
        for number, (more, cost) in enumerate(zip(worth, seconds[1:]), 1):  # noqa: B905
            tokens += more
            rate = tokens / (cost + spent)
            if rate > best:
                best, count = rate, number
        if self._num_steps % EXPLORE_EVERY == 0:
            count = min(len(worth), max(count + 4, 2 * count))
        return (worth[count - 1] if count else float("inf")), seconds

    def _usual_threshold(self, view: StepView) -> float:
        """What a token has to be worth at about the rows that the drafts so far will add."""
        if self._step.threshold:
            return self._step.threshold
        chances = [self._chances(d, ask) for ask in view.asks for d in ask.drafts[:1]]
        first = view.num_rows + min(sum(map(len, chances)), view.row_budget)
        row, now = self._row_seconds(first, view)
        weight = sum(ask.weight for ask in view.asks) + sum(map(sum, chances))
        self._step.threshold = max(FLOOR, row * weight / (now + view.spent))
        return self._step.threshold

    def _row_seconds(self, num_rows: int, view: StepView) -> tuple[float, float]:
        """Seconds that one more row takes, and those of `num_rows` rows."""
        seconds = self.cost.seconds(num_rows, num_rows + 8, view.context)
        return (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1), seconds[0]

    def _choose_in_order(self, view: StepView) -> list[Draft]:
        """The first source that has something, up to where its earlier tokens survive enough."""
        left = view.row_budget
        row, now = self._row_seconds(view.num_rows, view)
        threshold = row * max(1, len(view.asks)) / now
        chosen = []
        for ask in view.asks:
            draft = next((draft for draft in ask.drafts if draft.token_ids), Draft())
            products = self._chances(draft, ask) if draft.token_ids else []
            products = [*products, *[0.0] * (len(draft) - len(products))]
            parents = draft.parents or range(-1, len(draft) - 1)
            most = left if ask.allowed.num_draft_tokens is None else ask.allowed.num_draft_tokens
            kept = [
                i for i, parent in enumerate(parents) if parent < 0 or products[parent] >= threshold
            ][: min(left, most)]
            left -= len(kept)
            chosen.append(subset(draft, kept))
        return chosen


def _num_rows(submitted: Draft, name: str) -> int:
    """Rows of the target that a source's tokens took."""
    base = name.removesuffix(extended(""))
    if submitted.sources:
        return submitted.sources.count(base)
    return len(submitted) if submitted.source == base else 0


def _cut(
    view: StepView,
    drafts: Sequence[Draft],
    chances: Sequence[Sequence[float]],
    threshold: float,
) -> list[Draft]:
    cut: list[Draft] = []
    left = view.row_budget
    for ask, draft, chance in zip(view.asks, drafts, chances, strict=True):
        least = threshold / ask.weight
        if draft.is_tree:
            rows = [i for i, value in enumerate(chance) if value >= least]
            kept = straightened(subset(draft, rows))
        else:
            kept = prefix(draft, sum(value >= least for value in chance))
        most = ask.allowed.num_draft_tokens
        kept = prefix(kept, left if most is None else min(left, most))
        left -= len(kept)
        cut.append(kept)
    return cut
