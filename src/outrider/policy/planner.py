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
from itertools import accumulate

from outrider.drafting.source import Draft, DraftSource
from outrider.engine.drafts import matched, prefix, straightened, subset
from outrider.engine.merging import merge, side_chance, trimmed
from outrider.policy.calibration import Calibration, extended
from outrider.policy.cost import CostModel
from outrider.policy.decisions import Decision, Plan
from outrider.policy.gains import SourceGain, bucket
from outrider.policy.view import Ask, StepView, cap

EXPLORE_EVERY = 64  # one step in so many goes beyond what pays, so that estimates stay alive
EXPLORED = 4  # rows that it adds
FLOOR = 0.01  # a token this unlikely is never worth a row
SIDE = 2.0  # times what a token had to be worth in the last step: what another draft has to add
PROBES = (1, 1, 2, 4)  # requests in the first calls of a source; the very first may warm up
CHEAP = 0.01  # of a step: a source that takes less is asked without a second thought
CHEAP_EVERY = 8  # calls of such a source of which one is timed
# So much more tokens per second a source has to promise to be asked, one that was not asked in the
# last step and one that was: estimates move a little in every step, and the best of many are best
# by luck as well.
TO_BEGIN, TO_GO_ON = 0.03, 0.01
HANDLING = 3e-5  # seconds that a draft takes to be looked at here, and judged afterwards
HOPE, CREDIT = 0.01, 5.0  # share of all steps to try what may not pay; as many at first, at most
KEPT_DECISIONS = 256
NOTHING = Draft()  # not to be changed


@dataclass(slots=True)
class _Asked:
    """That a source was asked for a request in this step."""

    name: str
    place: int  # bucket of what was expected without it
    best: int  # which of the proposals would have been submitted without it; -1: none, …
    length: int  # … and as far as that would have paid


@dataclass(slots=True)
class _Best:
    """The likeliest of a request's proposals."""

    num_drafts: int = 0  # that were compared
    index: int = -1  # of the draft; -1: none says anything
    expected: float = 0.0  # accepted tokens that it promises
    chances: list[float] = field(default_factory=list)  # of its tokens


NONE = _Best()  # not to be changed


@dataclass(slots=True)
class _Step:
    """What the planner has to remember of a step until its outcome is known."""

    asked: dict[str, list[_Asked]] = field(default_factory=dict)  # by request
    counts: dict[str, int] = field(default_factory=dict)  # source -> requests
    new_tokens: dict[str, int] = field(default_factory=dict)  # source -> text it has to take in
    chances: dict[int, list[float]] = field(default_factory=dict)  # by identity of the draft
    best: dict[str, _Best] = field(default_factory=dict)  # by request


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
        self._least = 0.0  # worth of a token that paid in the last step with drafts
        self._credit = CREDIT  # steps that may be spent on asking sources that may not pay

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
            least = CHEAP * self.cost.curve()[1]
            costs = {source.name: self.call_seconds(source.name) for source in sources}
            self._order = sorted(sources, key=lambda s: costs[s.name] * (costs[s.name] > least))
        return self._order

    def budgets(self, source: DraftSource, view: StepView) -> list[int]:
        """Most tokens to draft for each request; 0 where asking would not pay."""
        self._begin(view)
        left = view.row_budget
        most = [min(cap(ask, source), left) for ask in view.asks]
        able = [index for index, tokens in enumerate(most) if tokens]
        if not able:
            return most
        name = source.name
        gain = self._gain(name)
        if gain.cost.num_calls >= len(PROBES) and self._is_cheap(gain, len(able), view):
            self._step.counts[name] = len(able)
            return most
        chosen = self._worth_asking(name, able, view)
        length = gain.length
        return [min(tokens, length) if index in chosen else 0 for index, tokens in enumerate(most)]

    def extensions(self, source: DraftSource, view: StepView) -> list[tuple[int, Draft]]:
        """Where a chain of another source ends so surely that more of it would pay."""
        if self._is_biased_rule or not view.row_budget:
            return []
        self._begin(view)
        found: dict[int, tuple[int, Draft]] = {}
        for index, ask in enumerate(view.asks):
            base = self._base(ask, source.name)
            room = 0 if base is None else min(cap(ask, source), ask.room - len(base))
            if base is None or room <= 0:
                continue
            bound = ask.allowed.num_draft_tokens
            room = room if bound is None else min(room, bound - len(base))
            if room > 0:
                found[index] = (room, base)
        if not found:
            return []
        chosen = self._worth_asking(extended(source.name), list(found), view)
        if not chosen:
            return []
        return [found[i] if i in chosen else (0, NOTHING) for i in range(len(view.asks))]

    def choose(self, view: StepView) -> list[Draft]:
        """One draft per request, merged and cut to what pays."""
        self._begin(view)
        self._num_steps += 1
        self._credit = min(CREDIT, self._credit + HOPE)
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
        step = self._step
        self._plans.append(
            Plan(self._num_steps, view, step.counts, step.chances, chosen, chances, seconds)
        )
        return chosen

    def observe(self, ask: Ask, submitted: Draft, true_ids: Sequence[int]) -> None:
        """Learn how right every proposal was, and what asking for it brought."""
        observe, kind = self.calibration.observe, ask.kind
        depths = [observe(draft, kind, true_ids) for draft in ask.drafts]
        every = self._step.asked.pop(ask.request_id, None)
        if every is None:
            return
        num_accepted = min(len(true_ids) - 1, matched(submitted, true_ids))
        for asked in every:
            before = min(depths[asked.best], asked.length) if asked.best >= 0 else 0
            brought = max(0, num_accepted - before)
            paid = self._least * _num_rows(submitted, asked.name) / ask.weight
            gain = self._gain(asked.name)
            gain.observe(ask.kind, ask.request_id, asked.place, brought, paid)
            own = next((draft for draft in ask.drafts if draft.source == asked.name), NOTHING)
            chances = self._step.chances.get(id(own))
            if chances is not None:
                gain.observe_length(_num_paying(chances, self._least / ask.weight))

    def observe_call(self, name: str, num_requests: int, seconds: float) -> None:
        """A call was made; what it brought is told by `observe`."""
        gain = self._gain(name)
        new_tokens = self._step.new_tokens.get(name)
        if new_tokens is None:  # it was asked because it is cheap
            gain.num_cheap += 1
            if gain.cost.num_calls >= len(PROBES) and gain.num_cheap % CHEAP_EVERY:
                return
        gain.cost.observe(num_requests, seconds, new_tokens or 0)

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

    def _is_cheap(self, gain: SourceGain, num_requests: int, view: StepView) -> bool:
        plain = self.cost.curve(view.context)[view.num_rows]
        return gain.cost.seconds(num_requests) + HANDLING * num_requests < CHEAP * plain

    def _chances(self, draft: Draft, ask: Ask) -> list[float]:
        chances = self._step.chances.get(id(draft))
        if chances is None:
            chances = self.calibration.chances(draft, ask.kind, FLOOR)
            self._step.chances[id(draft)] = chances
        return chances

    def _best(self, ask: Ask) -> _Best:
        """Of the proposals so far. They are looked at once; more may come."""
        drafts = ask.drafts
        if not drafts:
            return NONE
        best = self._step.best.get(ask.request_id)
        if best is None:
            best = self._step.best[ask.request_id] = _Best()
        elif best.num_drafts == len(drafts):
            return best
        for index in range(best.num_drafts, len(drafts)):
            chances = self._chances(drafts[index], ask)
            expected = sum(chances)
            if expected > best.expected:
                best.index, best.expected, best.chances = index, expected, chances
        best.num_drafts = len(drafts)
        return best

    def _base(self, ask: Ask, name: str) -> Draft | None:
        """The best draft of a request, where a source may go on from its end and that is likely."""
        best = self._best(ask)
        if best.index < 0:
            return None
        base, chances = ask.drafts[best.index], best.chances
        if base.parents or len(chances) < len(base) or chances[-1] * ask.weight <= self._least:
            return None
        return None if name == base.source or name in base.sources else base

    def _worth_asking(self, name: str, able: Sequence[int], view: StepView) -> set[int]:
        """Requests for which a source is asked: those that raise tokens per second together."""
        gain = self._gain(name)
        # Under a biased rule what is proposed has no say in who else is asked.
        best = [NONE] * len(view.asks) if self._is_biased_rule else list(map(self._best, view.asks))
        if gain.cost.num_calls < len(PROBES):  # nobody knows what it costs
            chosen = able[: PROBES[gain.cost.num_calls]]
        elif any(each.num_drafts for each in best):
            chosen = self._paying(gain, able, view, [each.expected for each in best])
        elif gain.is_settled(names := [view.asks[index].request_id for index in able]):
            chosen = []
        else:
            chosen = self._paying(gain, able, view, [0.0] * len(best))
            gain.settle([] if chosen else names)
        gain.is_on = bool(chosen)
        if gain.is_due(bool(chosen), EXPLORE_EVERY):
            chosen = [able[self._num_steps % len(able)]]
        if not chosen:
            return set()
        step = self._step
        step.counts[name] = len(chosen)
        step.new_tokens[name] = sum([gain.take(view.asks[index]) for index in chosen])
        for index in chosen:
            asked = self._asked(name, best[index], view.asks[index])
            step.asked.setdefault(view.asks[index].request_id, []).append(asked)
        return set(chosen)

    def _asked(self, name: str, best: _Best, ask: Ask) -> _Asked:
        length = _num_paying(best.chances, self._least / ask.weight)
        return _Asked(name, bucket(best.expected), best.index, length)

    def _paying(
        self, gain: SourceGain, able: Sequence[int], view: StepView, expected: Sequence[float]
    ) -> list[int]:
        """Those for which a call is likely to pay; or may at best, as far as there is credit.

        A request pays if what it brings is more than tokens per second without it make in the time
        that it takes, and the call if all who pay make up for what it costs by itself. Who is not
        asked is not seen, so that a source could be written off by bad luck. What is spent on hope
        alone is at most a share of all time.
        """
        asks, cost = view.asks, gain.cost
        curve = self.cost.curve(view.context)
        # Rows that the drafts so far will add: about as many as the tokens they promise.
        rows = view.num_rows + min(view.row_budget, round(1.5 * sum(expected)))
        tokens = sum([ask.weight * (1.0 + value) for ask, value in zip(asks, expected)])  # noqa: B905
        rate = tokens / (curve[rows] + view.spent - self._due(view))
        price = rate * cost.base + tokens * (TO_GO_ON if gain.is_on else TO_BEGIN)
        kept, each = gain.kept, cost.each + HANDLING
        likely: list[float] = []  # what it brings beyond its price, by request
        hoped: list[float] = []
        for index in able:
            ask = asks[index]
            usual, best = gain.expect(ask.kind, ask.request_id, bucket(expected[index]))
            least = rate * (each + gain.intake_seconds(ask))
            share = kept * ask.weight
            likely.append(share * usual - least)
            hoped.append(share * best - least)
        chosen = _all_that_pay(able, likely, price)
        if len(chosen) == len(able) or self._credit <= 0:
            return chosen
        more = _all_that_pay(able, hoped, price)
        if len(more) <= len(chosen):
            return chosen
        seconds = cost.seconds(len(more)) - (cost.seconds(len(chosen)) if chosen else 0)
        self._credit -= seconds / curve[view.num_rows]
        return more

    def _due(self, view: StepView) -> float:
        """Seconds that rows of prompts take in a step.

        They are due whatever is drafted. Were they counted, a draft token would look cheap beside
        them; but it saves none of them, only a share of a later step of as many requests.
        """
        curve = self.cost.curve(view.context)
        return curve[view.num_rows] - curve[min(len(view.asks), view.num_rows)]

    def _merged(self, ask: Ask) -> tuple[Draft, list[float]]:
        """The drafts of a request in one, and the chances of its tokens, down to the last of use.

        Only what may pay is merged with the likeliest draft: to look whether a draft leaves it
        takes a tenth of the time that it takes to merge them.
        """
        likeliest = self._best(ask).index
        if likeliest < 0:
            return NOTHING, []
        least = self._least / ask.weight
        drafts: list[Draft] = []
        chances: list[list[float]] = []
        best = 0
        for index, draft in enumerate(ask.drafts):
            chance = self._chances(draft, ask)
            if not chance:
                continue
            if draft.parents:
                draft, chance = trimmed(draft, chance, least)
            if index == likeliest:
                best = len(drafts)
            drafts.append(draft)
            chances.append(chance)
        if len(drafts) < 2:
            return drafts[0], chances[0]
        kept = [
            i
            for i, draft in enumerate(drafts)
            if i == best
            or side_chance(drafts[best], chances[best], draft, chances[i]) > SIDE * least
        ]
        if len(kept) == 1:
            return drafts[best], chances[best]
        return trimmed(*merge([drafts[i] for i in kept], [chances[i] for i in kept]), least)

    def _threshold(
        self, view: StepView, chances: Sequence[Sequence[float]]
    ) -> tuple[float, list[float]]:
        """Smallest worth of a token that pays for its row, and the seconds of each row count."""
        worth: list[float] = []
        for ask, row in zip(view.asks, chances, strict=True):
            worth += row if ask.weight == 1.0 else [ask.weight * chance for chance in row]
        worth.sort(reverse=True)
        del worth[view.row_budget :]
        first, spent = view.num_rows, view.spent - self._due(view)
        seconds = self.cost.curve(view.context)[first : first + len(worth) + 1]
        tokens = accumulate(worth, initial=sum([ask.weight for ask in view.asks]))
        rates = [total / (cost + spent) for total, cost in zip(tokens, seconds)]  # noqa: B905
        best = max(rates)
        count = rates.index(best)
        if worth:
            self._least = best * max(0.0, seconds[min(count + 1, len(worth))] - seconds[count])
        if self._num_steps % EXPLORE_EVERY == 0:
            count = min(len(worth), count + EXPLORED)
        return (worth[count - 1] if count else float("inf")), seconds

    def _choose_in_order(self, view: StepView) -> list[Draft]:
        """The first source that has something, up to where its earlier tokens survive enough."""
        left = view.row_budget
        seconds = self.cost.seconds(view.num_rows, view.num_rows + 8, view.context)
        row = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1)
        threshold = row * max(1, len(view.asks)) / seconds[0]
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


def _all_that_pay(able: Sequence[int], worth: Sequence[float], price: float) -> list[int]:
    """Requests that are worth something, if they are worth more than a price together."""
    more = sum([value for value in worth if value > 0])
    return [i for i, value in zip(able, worth, strict=True) if value > 0] if more > price else []


def _num_paying(chances: Sequence[float], least: float) -> int:
    return len([chance for chance in chances if chance >= least])


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
        if not chance:
            cut.append(NOTHING)
            continue
        least = threshold / ask.weight
        if draft.parents:
            rows = [i for i, value in enumerate(chance) if value >= least]
            kept = straightened(subset(draft, rows))
        else:
            kept = prefix(draft, _num_paying(chance, least))
        most = ask.allowed.num_draft_tokens
        kept = prefix(kept, left if most is None else min(left, most))
        left -= len(kept)
        cut.append(kept)
    return cut
