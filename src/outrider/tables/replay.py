"""What a table would do on a text: the calibration of a build, and the numbers of `coverage`."""

from dataclasses import dataclass

import numpy as np

from outrider.tables.format import Contents
from outrider.tables.hashing import MAX_KEY, NUM_CELLS, NUM_SHARES, NUM_TOTALS, TOTAL_TOPS
from outrider.tables.lookup import Found, TableLookup
from outrider.tables.records import DOUBT

AT_ONCE = 4096  # places looked up in one call
PRIOR_WEIGHT = 20.0  # observations the formula for confidence is worth in each cell
SHARES = (1.0, 0.94, 0.82, 0.6, 0.4, 0.27, 0.15, 0.06)  # typical of each class of shares


def usual_confidence() -> np.ndarray:
    """Confidence by cell without any held-out text: float32 [NUM_CELLS]."""
    totals = np.array([*TOTAL_TOPS, 2 * TOTAL_TOPS[-1]], np.float64)
    doubt = np.array(DOUBT)[:, None, None]
    table = np.array(SHARES) * totals[:, None] / (totals[:, None] + doubt)
    assert table.shape == (MAX_KEY, NUM_TOTALS, NUM_SHARES)
    return table.astype(np.float32).ravel()


@dataclass(slots=True)
class Stream:
    """Texts one after the other."""

    tokens: np.ndarray  # int32 [n], -1 between texts
    counted: np.ndarray  # uint8 [n], 0 where a token is only context


@dataclass(slots=True)
class Replay:
    """What a table proposed at each counted place of a stream."""

    places: np.ndarray  # int64 [n], indices into the stream
    accepted: np.ndarray  # int64 [n], tokens of the draft that the text goes on with
    survival: np.ndarray  # float64 [n], how many were expected
    first_cell: np.ndarray  # int64 [n], of what the longest key has, -1: there is no draft
    first_is_right: np.ndarray  # bool [n]

    @property
    def key_lengths(self) -> np.ndarray:
        """Length of the longest key that the table has, 0: there is no draft."""
        return np.where(self.first_cell < 0, 0, self.first_cell // (NUM_TOTALS * NUM_SHARES) + 1)


def replay(lookup: TableLookup, stream: Stream) -> Replay:
    """Draft at every counted place of a stream and compare with what follows."""
    places = np.flatnonzero((stream.counted > 0) & (stream.tokens >= 0))
    texts = np.cumsum(stream.tokens < 0)
    results = []
    # With several branches a draft may begin with what a shorter key says: ask for the longest.
    longest = TableLookup(lookup.contents, lookup.confidence, width=1)
    for start in range(0, len(places), AT_ONCE):
        some = places[start : start + AT_ONCE]
        results.append(_replay_some(lookup, longest, stream.tokens, texts, some))
        lookup.contents.forget()
    columns = zip(*results, strict=True) if results else ([np.empty(0)] * 4)
    return Replay(places, *(np.concatenate([*column]) for column in columns))


def calibrated(contents: Contents, stream: Stream | None) -> np.ndarray:
    """Confidence by cell: the usual one, and what held-out text says: float32 [NUM_CELLS]."""
    usual = usual_confidence()
    if stream is None:
        return usual
    found = replay(TableLookup(contents, usual, width=1), stream)
    used = found.first_cell >= 0
    cells = found.first_cell[used].astype(np.int64)
    seen = np.bincount(cells, minlength=NUM_CELLS)
    right = np.bincount(cells, found.first_is_right[used], NUM_CELLS)
    return ((PRIOR_WEIGHT * usual + right) / (PRIOR_WEIGHT + seen)).astype(np.float32)


def _replay_some(
    lookup: TableLookup,
    longest: TableLookup,
    tokens: np.ndarray,
    texts: np.ndarray,
    places: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    n = len(places)
    contexts = _tokens_before(tokens, texts, places, lookup.max_key)
    best = _drafts(longest, contexts)
    found = _drafts(lookup, contexts)
    accepted, expected = np.zeros(n, np.int64), np.zeros(n)
    # Where in the text each node is if it is right: -1 for those that are not.
    at = np.full((n, lookup.width + 1), -1, np.int64)
    at[:, -1] = places - 1  # the context itself, node -1
    survival = np.ones((n, lookup.width + 1))
    for node in range(lookup.width):
        rows = np.flatnonzero(found.lengths[:n] > node)
        parents = found.parents[rows, node]
        survival[rows, node] = survival[rows, parents] * found.confidence[rows, node]
        expected[rows] += survival[rows, node]
        place = at[rows, parents] + 1
        inside = np.minimum(place, len(tokens) - 1)
        is_right = (at[rows, parents] >= 0) & (place < len(tokens))
        is_right &= (tokens[inside] == found.tokens[rows, node]) & (
            texts[inside] == texts[places[rows]]
        )
        at[rows[is_right], node] = place[is_right]
        accepted[rows] += is_right
    is_drafted = (found.lengths[:n] > 0) & (best.lengths[:n] > 0)
    first = np.where(is_drafted, best.cells[:n, 0], -1).astype(np.int64)
    return accepted, expected, first, at[:, 0] >= 0


def _drafts(lookup: TableLookup, contexts: np.ndarray) -> Found:
    n = len(contexts)
    lookup.make_room(n)
    lookup.contexts[:n] = contexts
    lookup.budgets[:n] = lookup.width
    return lookup.draft(n)


def _tokens_before(
    tokens: np.ndarray, texts: np.ndarray, places: np.ndarray, count: int
) -> np.ndarray:
    """int32 [n, count], the newest first, -1 before the start of a text."""
    before = places[:, None] - np.arange(1, count + 1)
    inside = np.maximum(before, 0)
    is_known = (before >= 0) & (tokens[inside] >= 0) & (texts[inside] == texts[places][:, None])
    return np.where(is_known, tokens[inside], -1).astype(np.int32)
