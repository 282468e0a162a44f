"""What the confidence of a draft token is worth, learnt from what became of earlier ones.

A source says how sure it is of a token, given that those before it are accepted. How often it is
right differs by source, by place in the draft and by kind of text, and changes with time. Every
(source, kind) has a table of what to add to a confidence, by place and by the confidence itself;
a kind starts from what holds for all kinds of the source.

The target's own choice shows whether a token was right, submitted or not, as far as the true text
is known: sources that were not used are calibrated too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from time import monotonic

import numpy as np

from outrider.drafting.source import Draft
from outrider.engine.drafts import matched

DEFAULT_CONFIDENCE = 0.5  # of a source that gives none
BINS = 20  # of confidence
TOPS = (1, 2, 4, 8)  # deepest token of each class of places; the last class has no top
PRIOR_WEIGHT = 4.0  # tokens after which what was seen outweighs what was said
MEMORY = 1000.0  # tokens of a cell beyond which older ones fade
HALF_LIFE = 600.0  # seconds in which what was seen loses half its weight
LEAST, MOST = 0.005, 0.995  # no confidence beyond them
# Tokens are counted when there are so many, or an eighth of all before: 50 µs for any number.
NEWS, SHARE = 256, 0.125

PLACES = [sum(depth > top for top in TOPS) for depth in range(1, 65)]  # class by depth - 1
NUM_PLACES = len(TOPS) + 1


@dataclass(frozen=True, slots=True)
class Observed:
    """How the tokens of one source fared at one class of places, older ones counted less."""

    source: str
    kind: str
    first_position: int
    num_tokens: float
    mean_confidence: float
    accepted_share: float


class _Table:
    """Sums and corrections of one (source, kind)."""

    def __init__(self, above: "_Table | None", now: float) -> None:
        self._above = above
        self._now = now
        self._seen = np.zeros((NUM_PLACES, BINS + 1))
        self._gap = np.zeros((NUM_PLACES, BINS + 1))  # accepted less expected
        self.sums = np.zeros((NUM_PLACES, 3))  # tokens, expected, accepted
        self._places: list[int] = []  # of tokens that are not counted yet, …
        self._said: list[float] = []
        self._right: list[bool] = []
        self._next = 1  # … and how many there have to be
        # What to add to a confidence; lists, because single numbers of an array take 100 ns each.
        self.shift = [[0.0] * (BINS + 1) for _ in range(NUM_PLACES)]
        if above is not None:
            above.count(now)
            self.shift = [list(row) for row in above.shift]

    def add(self, places: list[int], said: Sequence[float], right: list[bool]) -> None:
        """Tokens at these places that were said to be so likely, and whether they were right."""
        self._places += places
        self._said += said
        self._right += right

    def is_due(self) -> bool:
        return len(self._places) >= self._next

    def count(self, now: float) -> None:
        """Take in what was added, let what is old count less, and correct."""
        if self._above is not None and self._above.is_due():
            self._above.count(now)
        factor = 0.5 ** ((now - self._now) / HALF_LIFE)
        self._now = now
        for sums in (self._seen, self._gap, self.sums):
            sums *= factor
        places, said = np.array(self._places, int), np.array(self._said)
        right = np.array(self._right, float)
        cells = places * (BINS + 1) + (said * BINS).astype(int)
        size = NUM_PLACES * (BINS + 1)
        self._seen += np.bincount(cells, minlength=size).reshape(self._seen.shape)
        self._gap += np.bincount(cells, right - said, size).reshape(self._gap.shape)
        for i, values in enumerate((None, said, right)):
            self.sums[:, i] += np.bincount(places, values, NUM_PLACES)
        is_old = self._seen > MEMORY
        self._seen[is_old] /= 2
        self._gap[is_old] /= 2
        self.sums[self.sums[:, 0] > MEMORY] /= 2
        self._places, self._said, self._right = [], [], []
        self._next = max(1, min(NEWS, int(SHARE * self.sums[:, 0].sum())))
        self._correct()

    def _correct(self) -> None:
        if self._above is None:
            num, expected, accepted = self.sums.T
            prior = ((accepted - expected) / (num + PRIOR_WEIGHT))[:, None]
        else:
            prior = np.array(self._above.shift)
        shift = (self._gap + PRIOR_WEIGHT * prior) / (self._seen + PRIOR_WEIGHT)
        self.shift = shift.tolist()


class Calibration:
    """Corrected chances of drafts, by source, kind and place."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._tables: dict[tuple[str, str], _Table] = {}

    def chances(self, draft: Draft, kind: str, floor: float = 0.0) -> list[float]:
        """Of every token the chance that it and all before it on its path are accepted.

        A chain ends before the first chance below `floor`.
        """
        if draft.parents:
            return self._tree_chances(draft, kind)
        chances: list[float] = []
        chance = 1.0
        if draft.sources:
            rows = self._mixed_rows(draft, kind)
        else:
            shift = self._counted(draft.source, kind).shift
            rows = map(shift.__getitem__, chain(PLACES, repeat(NUM_PLACES - 1)))
        for said, row in zip(_confidence(draft), rows):  # noqa: B905 (a µs per draft)
            said += row[int(said * BINS)]
            chance *= LEAST if said < LEAST else MOST if said > MOST else said
            if chance < floor:
                break
            chances.append(chance)
        return chances

    def _mixed_rows(self, draft: Draft, kind: str) -> list[list[float]]:
        """A token behind another source's is calibrated by itself: see `extended`."""
        tables = {
            name: self._counted(name if name == draft.source else extended(name), kind)
            for name in set(draft.sources)
        }
        return [tables[name].shift[_place(i + 1)] for i, name in enumerate(draft.sources)]

    def _tree_chances(self, draft: Draft, kind: str) -> list[float]:
        shift = self._counted(draft.source, kind).shift
        chances: list[float] = []
        depths: list[int] = []
        for said, parent in zip(_confidence(draft), draft.parents):  # noqa: B905
            depth = depths[parent] + 1 if parent >= 0 else 0
            depths.append(depth)
            said += shift[_place(depth)][int(said * BINS)]
            said = LEAST if said < LEAST else MOST if said > MOST else said
            chances.append(said * chances[parent] if parent >= 0 else said)
        return chances

    def observe(self, draft: Draft, kind: str, true_ids: Sequence[int]) -> int:
        """Count the tokens of a proposal that the true text shows to be right or wrong.

        Args:
            true_ids: what the text went on with: accepted tokens and the bonus token.

        Returns:
            Depth to which the proposal says the same.
        """
        if draft.parents:
            return self._observe_tree(draft, kind, true_ids)
        depth = matched(draft, true_ids)
        first = draft.sources.count(draft.source)  # of a chain of two sources the second is news
        if depth < first or not draft.token_ids:
            return depth
        last = min(depth + 1, len(draft), len(true_ids))
        name = extended(draft.sources[-1]) if first else draft.source
        right = [True] * (depth - first)
        if last > depth:
            right.append(False)
        places = (
            PLACES[first:last] if last <= len(PLACES) else list(map(_place, range(first, last)))
        )
        self._add(name, kind, places, _confidence(draft)[first:last], right)
        return depth

    def _observe_tree(self, draft: Draft, kind: str, true_ids: Sequence[int]) -> int:
        """Along the true path, and the siblings of its tokens."""
        confidence = _confidence(draft)
        places: list[int] = []
        said: list[float] = []
        right: list[bool] = []
        node: int | None = -1
        for depth, true in enumerate(true_ids):
            children = [i for i, parent in enumerate(draft.parents) if parent == node]
            node = None
            for index in children:
                is_right = draft.token_ids[index] == true
                places.append(_place(depth))
                said.append(confidence[index])
                right.append(is_right)
                node = index if is_right else node
            if node is None:
                break
        self._add(draft.source, kind, places, said, right)
        return sum(right)

    def observed(self) -> list[Observed]:
        """How every source fared, by kind and place."""
        rows = []
        for (source, kind), table in sorted(self._tables.items()):
            table.count(self._clock())
            for place, (num, expected, accepted) in enumerate(table.sums.tolist()):
                first = 1 if place == 0 else TOPS[place - 1] + 1
                if num > 0.5:
                    share = accepted / num
                    rows.append(Observed(source, kind, first, num, expected / num, share))
        return rows

    def _add(
        self, name: str, kind: str, places: list[int], said: Sequence[float], right: list[bool]
    ) -> None:
        self._table(name, kind).add(places, said, right)
        if kind:
            self._table(name, "").add(places, said, right)

    def _counted(self, source: str, kind: str) -> _Table:
        table = self._table(source, kind)
        if table.is_due():
            table.count(self._clock())
        return table

    def _table(self, source: str, kind: str) -> _Table:
        table = self._tables.get((source, kind))
        if table is None:
            above = self._table(source, "") if kind else None
            table = self._tables[source, kind] = _Table(above, self._clock())
        return table


def extended(source: str) -> str:
    """What a source is called where it goes on from another one's draft."""
    return source + "+"


def _place(index: int) -> int:
    """Class of the token at an index of a chain."""
    return PLACES[index] if index < len(PLACES) else NUM_PLACES - 1


def _confidence(draft: Draft) -> Sequence[float]:
    """As the source gave it, within [0, 1]."""
    if not draft.confidence:
        return [DEFAULT_CONFIDENCE] * len(draft)
    if max(draft.confidence) <= 1.0:
        return draft.confidence
    return [min(1.0, value) for value in draft.confidence]
