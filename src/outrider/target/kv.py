"""Who owns which KV page. Bookkeeping only: no tensor is touched here.

An owner is any hashable value: a request id, or a (zone, request id) pair. Its tokens fill its
pages in order; the first `num_committed` of them are final, the room behind them is reserved
for the tokens of the next forward and given back by `rollback`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from outrider.errors import KVFull
from outrider.target.base import PAGE_SIZE


def pages_for(num_tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(slots=True)
class _Holding:
    table: np.ndarray = field(default_factory=lambda: np.zeros(8, np.int32))  # grows by doubling
    num_pages: int = 0
    num_committed: int = 0

    @property
    def num_reserved(self) -> int:
        return self.num_pages * PAGE_SIZE - self.num_committed


class KVArena:
    """Pages of PAGE_SIZE tokens, handed to owners in as few contiguous runs as possible.

    Attention reads a run in place, so a new run starts in the middle of the largest free gap:
    its left neighbour and itself can both go on growing contiguously.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, num_pages
        self.num_pages = num_pages
        self.num_free_pages = num_pages
        self._holdings: dict[Hashable, _Holding] = {}
        self._is_free = np.ones(num_pages + 1, np.bool_)
        self._is_free[num_pages] = False  # sentinel: extending past the end finds it taken

    def reserve(self, owner: Hashable, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens beyond the committed ones.

        Raises:
            KVFull: not enough free pages; nothing has changed.
        """
        holding = self._holdings.get(owner)
        if holding is not None and holding.num_reserved >= num_tokens:
            return
        committed = holding.num_committed if holding is not None else 0
        held = holding.num_pages if holding is not None else 0
        wanted = pages_for(committed + num_tokens) - held
        if wanted > self.num_free_pages:
            raise KVFull(
                f"{num_tokens} tokens need {wanted} more KV pages of {PAGE_SIZE} tokens, "
                f"{self.num_free_pages} of {self.num_pages} are free"
            )
        if holding is None:
            holding = self._holdings[owner] = _Holding()
        self._grow(holding, wanted)

    def num_available(self, owner: Hashable) -> int:
        """Tokens beyond the committed ones that `reserve` could grant now."""
        holding = self._holdings.get(owner)
        free = self.num_free_pages * PAGE_SIZE
        return free if holding is None else free + holding.num_reserved

    def commit(self, owner: Hashable, num_tokens: int) -> None:
        """Make the next `num_tokens` reserved tokens final."""
        holding = self._holdings[owner]
        assert 0 <= num_tokens <= holding.num_reserved, (owner, num_tokens, holding.num_reserved)
        holding.num_committed += num_tokens

    def rollback(self, owner: Hashable) -> None:
        """Give back the pages beyond the committed tokens."""
        holding = self._holdings[owner]
        keep = pages_for(holding.num_committed)
        if keep < holding.num_pages:
            self._free(holding.table[keep : holding.num_pages])
            holding.num_pages = keep

    def release(self, owner: Hashable) -> None:
        """Give back everything the owner holds; nothing to do when it holds nothing."""
        holding = self._holdings.pop(owner, None)
        if holding is not None:
            self._free(holding.table[: holding.num_pages])

    def page_table(self, owner: Hashable) -> np.ndarray:
        """Physical pages in logical order, int32 [P], a view valid until the next change."""
        holding = self._holdings[owner]
        return holding.table[: holding.num_pages]

    def num_committed(self, owner: Hashable) -> int:
        """Tokens whose KV is final; 0 for an unknown owner."""
        holding = self._holdings.get(owner)
        return 0 if holding is None else holding.num_committed

    @property
    def owners(self) -> list[Hashable]:
        return list(self._holdings)

    def check_integrity(self) -> None:
        """Assert that every page is free or has exactly one owner, and that all counts agree."""
        owners_of_page = np.zeros(self.num_pages, np.int64)
        for owner, holding in self._holdings.items():
            pages = holding.table[: holding.num_pages]
            assert ((pages >= 0) & (pages < self.num_pages)).all(), (owner, pages)
            np.add.at(owners_of_page, pages, 1)
            assert holding.num_reserved >= 0, (owner, holding)
        expected = np.where(self._is_free[: self.num_pages], 0, 1)
        wrong = np.flatnonzero(owners_of_page != expected)
        assert not len(wrong), f"pages {wrong.tolist()} are leaked or have several owners"
        assert self.num_free_pages == int(self._is_free.sum()), self.num_free_pages

    def _grow(self, holding: _Holding, wanted: int) -> None:
        table = holding.table
        if holding.num_pages + wanted > len(table):
            size = max(2 * len(table), holding.num_pages + wanted)
            holding.table = np.zeros(size, np.int32)
            holding.table[: holding.num_pages] = table[: holding.num_pages]
        if holding.num_pages:
            wanted = self._take(holding, int(holding.table[holding.num_pages - 1]) + 1, wanted)
        while wanted:
            wanted = self._take(holding, self._start_of_run(wanted), wanted)

    def _take(self, holding: _Holding, start: int, wanted: int) -> int:
        """Take up to `wanted` free pages from `start` on; return how many are still wanted."""
        window = self._is_free[start : start + wanted]
        taken = len(window) if window.all() else int(window.argmin())
        window[:taken] = False
        holding.table[holding.num_pages : holding.num_pages + taken] = np.arange(
            start, start + taken, dtype=np.int32
        )
        holding.num_pages += taken
        self.num_free_pages -= taken
        return wanted - taken

    def _start_of_run(self, wanted: int) -> int:
        edges = np.diff(self._is_free.astype(np.int8), prepend=0)
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        largest = int((ends - starts).argmax())
        start, length = int(starts[largest]), int(ends[largest] - starts[largest])
        slack = max(0, length - wanted)
        return start if start == 0 else start + slack // 2

    def _free(self, pages: np.ndarray) -> None:
        assert not self._is_free[pages].any(), f"pages {pages.tolist()} were already free"
        self._is_free[pages] = True
        self.num_free_pages += len(pages)
