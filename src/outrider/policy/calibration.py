"""What the confidence of a draft token is worth, learnt from what became of earlier ones.

A source says how sure it is of a token, given that those before it are accepted. How often it is
right differs by source, by place in the draft and by kind of text, and changes with time. Every
(source, kind) has a table of what to add to a confidence, by place and by the confidence itself;
a kind starts from what holds for all kinds of the source.

The target's own choice shows whether a token was right, submitted or not, as far as the true text
is known: sources that were not used are calibrated too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from time import monotonic

from outrider.drafting.source import Draft

DEFAULT_CONFIDENCE = 0.5  # of a source that gives none
BINS = 20  # of confidence
TOPS = (1, 2, 4, 8)  # deepest token of each class of places; the last class has no top
PRIOR_WEIGHT = 4.0  # tokens after which what was seen outweighs what was said
REFRESH = 8  # tokens after which cells that saw none follow their neighbours: 3 µs
MEMORY = 1000.0  # tokens of a cell beyond which older ones fade
HALF_LIFE = 600.0  # seconds in which what was seen loses half its weight
LEAST, MOST = 0.005, 0.995  # no confidence beyond them

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
        self._news = 0
        size = range(NUM_PLACES)
        self.shift = [[0.0] * (BINS + 1) for _ in size]  # what to add to a confidence
        self.seen = [[0.0] * (BINS + 1) for _ in size]
        self.gap = [[0.0] * (BINS + 1) for _ in size]  # accepted less expected
        self.num = [0.0] * NUM_PLACES
        self.expected = [0.0] * NUM_PLACES
        self.accepted = [0.0] * NUM_PLACES
        if above is not None:
            self.shift = [list(row) for row in above.shift]

    def fade(self, now: float) -> None:
        """Let what is old count less."""
        if now - self._now < HALF_LIFE / 10:
            return
        factor = 0.5 ** ((now - self._now) / HALF_LIFE)
        self._now = now
        for rows in (self.seen, self.gap):
            for row in rows:
                row[:] = [value * factor for value in row]
        for row in (self.num, self.expected, self.accepted):
            row[:] = [value * factor for value in row]

    def count(self, place: int, confidence: float, is_right: bool) -> None:
        cell = int(confidence * BINS)
        seen, gap = self.seen[place], self.gap[place]
        if seen[cell] > MEMORY:
            seen[cell] /= 2
            gap[cell] /= 2
        if self.num[place] > MEMORY:
            self.num[place] /= 2
            self.expected[place] /= 2
            self.accepted[place] /= 2
        seen[cell] += 1
        gap[cell] += is_right - confidence
        self.num[place] += 1
        self.expected[place] += confidence
        self.accepted[place] += is_right
        self._news += 1
        self._correct(place, range(BINS + 1) if self._news % REFRESH == 0 else (cell,))

    def _correct(self, place: int, cells: Iterable[int]) -> None:
        seen, gap, shift = self.seen[place], self.gap[place], self.shift[place]
        above = None if self._above is None else self._above.shift[place]
        usual = (self.accepted[place] - self.expected[place]) / (self.num[place] + PRIOR_WEIGHT)
        for cell in cells:
            prior = usual if above is None else above[cell]
            shift[cell] = (gap[cell] + PRIOR_WEIGHT * prior) / (seen[cell] + PRIOR_WEIGHT)


class Calibration:
    """Corrected chances of drafts, by source, kind and place."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._tables: dict[tuple[str, str], _Table] = {}

    def chances(self, draft: Draft, kind: str, floor: float = 0.0) -> list[float]:
        """Of every token the chance that it and all before it on its path are accepted.

        A chain ends before the first chance below `floor`.
        """
        if draft.is_tree:
            return self._tree_chances(draft, kind)
        chances: list[float] = []
        chance = 1.0
        if draft.sources:
            rows = self._mixed_rows(draft, kind)
        else:
            shift = self._table(draft.source, kind).shift
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
            name: self._table(name if name == draft.source else extended(name), kind)
            for name in set(draft.sources)
        }
        return [tables[name].shift[_place(i + 1)] for i, name in enumerate(draft.sources)]

    def _tree_chances(self, draft: Draft, kind: str) -> list[float]:
        shift = self._table(draft.source, kind).shift
        chances: list[float] = []
        depths: list[int] = []
        for said, parent in zip(_confidence(draft), draft.parents, strict=True):
            depth = 1 if parent < 0 else depths[parent] + 1
            depths.append(depth)
            value = min(MOST, max(LEAST, said + shift[_place(depth)][int(said * BINS)]))
            chances.append(value * (chances[parent] if parent >= 0 else 1.0))
        return chances

    def observe(self, draft: Draft, kind: str, true_ids: Sequence[int]) -> None:
        """Count the tokens of a proposal that the true text shows to be right or wrong.

        Args:
            true_ids: what the text went on with: accepted tokens and the bonus token.
        """
        known = draft.sources.count(draft.source)  # of a chain of two sources the second is news
        if known and list(true_ids[:known]) != draft.token_ids[:known]:
            return
        confidence = _confidence(draft)
        node = -1
        for depth, true in enumerate(true_ids[known:], known + 1):
            children = (
                [i for i, parent in enumerate(draft.parents) if parent == node]
                if draft.is_tree
                else range(depth - 1, min(depth, len(draft)))
            )
            following = None
            for index in children:
                is_right = draft.token_ids[index] == true
                self._count(draft, index, kind, depth, confidence[index], is_right)
                if is_right:
                    following = index
            if following is None:
                return
            node = following

    def observed(self) -> list[Observed]:
        """How every source fared, by kind and place."""
        rows = []
        for (source, kind), table in sorted(self._tables.items()):
            table.fade(self._clock())
            rows += [
                Observed(
                    source,
                    kind,
                    1 if place == 0 else TOPS[place - 1] + 1,
                    num,
                    table.expected[place] / num,
                    table.accepted[place] / num,
                )
                for place, num in enumerate(table.num)
                if num > 0.5
            ]
        return rows

    def _count(
        self, draft: Draft, index: int, kind: str, depth: int, confidence: float, is_right: bool
    ) -> None:
        name = draft.source_of(index)
        if name != draft.source:
            name = extended(name)
        for table in {self._table(name, ""), self._table(name, kind)}:
            table.fade(self._clock())
            table.count(_place(depth), confidence, is_right)

    def _table(self, source: str, kind: str) -> _Table:
        table = self._tables.get((source, kind))
        if table is None:
            above = self._table(source, "") if kind else None
            table = self._tables[source, kind] = _Table(above, self._clock())
        return table


def extended(source: str) -> str:
    """What a source is called where it goes on from another one's draft."""
    return source + "+"


def _place(depth: int) -> int:
    return PLACES[depth - 1] if depth <= len(PLACES) else NUM_PLACES - 1


def _confidence(draft: Draft) -> Sequence[float]:
    """As the source gave it, within [0, 1]."""
    if not draft.confidence:
        return [DEFAULT_CONFIDENCE] * len(draft)
    if max(draft.confidence) <= 1.0:
        return draft.confidence
    return [min(1.0, value) for value in draft.confidence]
