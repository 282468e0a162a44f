"""The target's features of committed tokens: for sources that have not seen them yet, and for texts
that begin like an earlier one.

Shape legend: S slots of the arena, n tokens of one text, F width of all features.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from outrider.target.base import PAGE_SIZE

MANY = 64  # pieces of features, each of which keeps those of its whole step in memory


class Piece(NamedTuple):
    """Features of some tokens of one text: rows of those of a step."""

    rows: torch.Tensor  # [all of the step, F]
    start: int
    end: int


class WaitingFeatures:
    """What sources have not yet been told of each request, in the order of its text."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, str], list[Piece]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, source: str, request_id: str, rows: torch.Tensor, start: int, end: int) -> None:
        """The next tokens' features lie in these rows [start, end)."""
        pieces = self._pieces.setdefault((source, request_id), [])
        pieces.append(Piece(rows, start, end))
        if len(pieces) % MANY == 0:
            _gather(pieces)

    def take(self, source: str, request_id: str) -> torch.Tensor | None:
        """Everything that waits, [n, F], which then waits no more; None: nothing does."""
        pieces = self._pieces.pop((source, request_id), None)
        return None if pieces is None else _joined(pieces)

    def drop(self, source: str, request_id: str) -> None:
        self._pieces.pop((source, request_id), None)


def _gather(pieces: list[Piece]) -> None:
    """Copy the small pieces at the end into one, which keeps nothing else in memory."""
    first = len(pieces)
    while first and pieces[first - 1].end - pieces[first - 1].start < MANY:
        first -= 1
    if first < len(pieces):
        whole = _joined(pieces[first:])
        pieces[first:] = [Piece(whole, 0, len(whole))]


def _joined(pieces: Sequence[Piece]) -> torch.Tensor:
    return torch.cat([rows[start:end] for rows, start, end in pieces])


class SlotFeatures:
    """Features of every KV slot; memory is taken when the first are kept.

    A request that begins with KV of an earlier text runs no forward over it, yet a drafter wants
    the features of every token. They lie by slot, so they belong to whoever holds the page.

    Args:
        dtype: that of the target, which drafters round to as well.
    """

    def __init__(self, num_pages: int, dtype: torch.dtype) -> None:
        self._num_slots = num_pages * PAGE_SIZE
        self._dtype = dtype
        self._given: torch.dtype = dtype
        self._rows: torch.Tensor | None = None  # [S, F]

    def keep(self, slots: np.ndarray, features: torch.Tensor) -> None:
        """Features [n, F] of the tokens in these slots, int [n]."""
        if self._rows is None:
            shape = (self._num_slots, features.shape[1])
            self._rows = torch.empty(shape, dtype=self._dtype, device=features.device)
            self._given = features.dtype
        index = torch.from_numpy(slots).to(features.device)
        self._rows[index] = features.to(self._dtype)  # [n, F]

    def of(self, slots: np.ndarray) -> torch.Tensor:
        """What was kept of the tokens in these slots, in the dtype it was given in: [n, F]."""
        assert self._rows is not None, "no features were kept"
        index = torch.from_numpy(slots).to(self._rows.device)
        return self._rows[index].to(self._given)  # [n, F]


def slots_of(pages: np.ndarray, first: int, end: int) -> np.ndarray:
    """Physical slots of the tokens [first, end) of a text with these pages: int64 [end - first]."""
    places = np.arange(first, end)
    return pages[places // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + places % PAGE_SIZE
