"""How likely a looked-up token is to be accepted, learnt from what became of earlier ones.

A draft token falls into a cell by where it was found (the request's own text or another), by
the length of the match before it and by the evidence there. Each cell keeps a running average;
each request has a factor on the failure rate, because an edit repeats its prompt where a chat
does not: without it the expected number of accepted tokens was 31 % too low on edits and 29 %
too high on source files, with it at most 13 % off on each of five kinds of text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.drafting.source import Outcome

LENGTH_TOPS = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # the last class has no top
NUM_LENGTHS = len(LENGTH_TOPS) + 1
NUM_EVIDENCE = 8
FIRST_DIVIDED = 4  # evidence classes from here on: the context had several continuations
MIN_FAILURE, MAX_FAILURE = 0.005, 0.98

# Share of accepted tokens, given that those before were. Measured by replaying source files,
# package descriptions, API documentation, edits of source files and JSON records in SmolLM2's
# tokens (about 200 k draft tokens, kinds weighted equally). Columns: only continuation, seen 1,
# 2, 3-4, 5 or more times; one of several, with a share of >= 3/4, 1/2, 1/4, less.
USUAL = np.array(
    [
        [0.27, 0.47, 0.61, 0.80, 0.46, 0.24, 0.16, 0.10],  # match of 1 token
        [0.46, 0.67, 0.80, 0.90, 0.56, 0.27, 0.20, 0.09],
        [0.56, 0.76, 0.87, 0.94, 0.55, 0.26, 0.19, 0.10],
        [0.65, 0.81, 0.92, 0.97, 0.65, 0.34, 0.20, 0.09],
        [0.77, 0.89, 0.94, 0.98, 0.72, 0.35, 0.19, 0.12],  # 5-6
        [0.78, 0.90, 0.96, 0.98, 0.68, 0.32, 0.16, 0.08],  # 7-8
        [0.86, 0.94, 0.97, 0.99, 0.65, 0.37, 0.20, 0.08],  # 9-12
        [0.87, 0.95, 0.98, 0.98, 0.70, 0.32, 0.18, 0.10],  # 13-16
        [0.90, 0.95, 0.97, 0.98, 0.60, 0.35, 0.20, 0.10],  # 17-32
        [0.97, 0.97, 0.97, 0.98, 0.70, 0.40, 0.25, 0.10],  # 33 and more
    ],
    np.float32,
)
USUAL_WEIGHT = 50.0  # observations the table above is worth
MAX_WEIGHT = 1000.0  # beyond it older observations fade
REQUEST_WEIGHT = 4.0  # failures a request's factor of 1 is worth
# Beyond it older failures of a request fade: the table learns too, and what both have learnt
# would count twice.
MAX_REQUEST_WEIGHT = 32.0


def evidence_class(count: int, total: int) -> int:
    """Class of a continuation seen `count` times of `total`; as in automaton.cpp."""
    if count >= total:
        return min(count - 1, 1) if count <= 2 else 2 if count <= 4 else 3
    return FIRST_DIVIDED + (4 * count < 3 * total) + (2 * count < total) + (4 * count < total)


def cell_of(length: int, count: int, total: int, in_other_text: bool) -> int:
    """Index into a flat table [2 (own, other text), NUM_LENGTHS, NUM_EVIDENCE]."""
    row = sum(length > top for top in LENGTH_TOPS)
    return (in_other_text * NUM_LENGTHS + row) * NUM_EVIDENCE + evidence_class(count, total)


def with_rows(array: np.ndarray, num_rows: int) -> np.ndarray:
    """A copy with zeros behind the rows that were there."""
    grown = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


class Rates:
    """Running shares of accepted tokens by cell, starting from usual ones worth `weight`."""

    def __init__(self, usual: np.ndarray, weight: float) -> None:
        self.table = usual.astype(np.float32).ravel()
        # Lists and a view: numpy takes 100 ns to read or write a single number.
        self._view: Any = self.table.data
        self._seen = [weight] * len(self.table)
        self._accepted = [weight * share for share in self.table.tolist()]

    def count(self, cell: int, accepted: bool) -> float:
        """Learn about one token; returns the share that was expected before."""
        seen, kept, expected = self._seen[cell], self._accepted[cell], self._view[cell]
        if seen >= MAX_WEIGHT:
            seen, kept = seen / 2, kept / 2
        self._seen[cell] = seen = seen + 1
        self._accepted[cell] = kept = kept + accepted
        self._view[cell] = kept / seen
        return expected

    def observe(self, cells: Sequence[int], outcome: Outcome) -> None:
        """Count the tokens of a chain whose cells these are."""
        for i, cell in enumerate(judged(cells, outcome)):
            self.count(cell, accepted=i < outcome.num_accepted_drafts)


def judged(cells: Sequence[int], outcome: Outcome) -> Sequence[int]:
    """Cells of the accepted draft tokens and of the rejected one; nothing is known of the rest.

    Without a bonus token the request ended inside the draft, and none was rejected.
    """
    accepted = outcome.num_accepted_drafts
    rejected = len(outcome.accepted_ids) > accepted
    return cells[: min(len(outcome.draft), accepted + rejected)]


class Calibration:
    """Usual confidence per cell, and per seat two factors on the failure rate."""

    def __init__(self) -> None:
        self._rates = Rates(np.concatenate([USUAL, USUAL]), USUAL_WEIGHT)
        self.table = self._rates.table  # float32 [2 * lengths * evidence]
        self.factors = np.zeros((0, 2), np.float32)  # [seats, (one continuation, several)]
        self._failures: list[list[float]] = []
        self._expected: list[list[float]] = []

    def grow(self, num_seats: int) -> None:
        """Room for this many seats; a new one must be `reset` before its use."""
        self.factors = with_rows(self.factors, num_seats)
        for sums in (self._failures, self._expected):
            sums.extend([0.0, 0.0] for _ in range(num_seats - len(sums)))

    def reset(self, seat: int) -> None:
        self.factors[seat] = 1
        self._failures[seat] = [REQUEST_WEIGHT, REQUEST_WEIGHT]
        self._expected[seat] = [REQUEST_WEIGHT, REQUEST_WEIGHT]

    def confidence(self, seat: int, cell: int) -> float:
        divided = cell % NUM_EVIDENCE >= FIRST_DIVIDED
        failure = (1 - self.table[cell]) * self.factors[seat, int(divided)]
        # In float32 as in automaton.cpp: in double, a chance of 1 - MAX_FAILURE lies on the other
        # side of a least survival of 0.02.
        return float(np.float32(1) - np.float32(min(MAX_FAILURE, max(MIN_FAILURE, failure))))

    def observe(self, seat: int, cells: Sequence[int], outcome: Outcome) -> None:
        """Learn from a chain whose cells these are."""
        failures, expected = self._failures[seat], self._expected[seat]
        num_accepted = outcome.num_accepted_drafts
        for i, cell in enumerate(judged(cells, outcome)):
            divided = cell % NUM_EVIDENCE >= FIRST_DIVIDED
            if expected[divided] > MAX_REQUEST_WEIGHT:
                expected[divided] /= 2
                failures[divided] /= 2
            expected[divided] += 1 - self._rates.count(cell, accepted=i < num_accepted)
            failures[divided] += i == num_accepted
        self.factors[seat] = [failures[0] / expected[0], failures[1] / expected[1]]
