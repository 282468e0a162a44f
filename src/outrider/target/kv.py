"""Who holds which KV page. Bookkeeping only: no tensor is touched here.

An owner is any hashable value: a request id, or a (zone, request id) pair. Its tokens fill its
pages in order; the first `num_committed` of them are final, the room behind them is reserved
for the tokens of the next forward and given back by `rollback`.

Full pages of final tokens may be published. Later owners whose text begins with the same tokens
adopt them, so such a page can have several owners; it is never written to again. After its last
owner it stays known until the room is needed.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from outrider.errors import KVFull
from outrider.target.base import PAGE_SIZE
from outrider.target.prefixes import PageKeys, PrefixIndex

# One page in so many is given up at once when room is short. One by one, from the end of the
# longest unused text, each would become a run of its own in what grows into them.
EVICTED_SHARE = 32


def pages_for(num_tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(slots=True)
class _Holding:
    table: np.ndarray = field(default_factory=lambda: np.zeros(8, np.int32))  # grows by doubling
    num_pages: int = 0
    num_committed: int = 0
    num_published: int = 0  # pages from the first on

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
        self._holdings: dict[Hashable, _Holding] = {}
        self._num_owners = np.zeros(num_pages, np.int32)
        self._is_free = np.ones(num_pages + 1, np.bool_)  # neither owned nor known
        self._is_free[num_pages] = False  # sentinel: extending past the end finds it taken
        self._num_empty = num_pages  # of `_is_free`
        self._index = PrefixIndex()

    @property
    def num_free_pages(self) -> int:
        """Pages without an owner; known ones among them give way when they are needed."""
        return self._num_empty + self._index.num_idle

    @property
    def num_known_pages(self) -> int:
        """Pages without an owner that a later text may begin with."""
        return self._index.num_idle

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

    def publish(self, owner: Hashable, keys: PageKeys, token_ids: np.ndarray) -> None:
        """Let later texts begin with the owner's full pages of committed tokens.

        Args:
            token_ids: int32 [n], the owner's text; committed tokens beyond it are left out.
        """
        holding = self._holdings[owner]
        count = min(holding.num_committed, len(token_ids)) // PAGE_SIZE
        if count > holding.num_published:
            known = keys.first(count, token_ids)
            for page in range(holding.num_published, count):
                self._index.add(known[page], int(holding.table[page]))
            holding.num_published = count

    def num_known(self, keys: PageKeys, token_ids: np.ndarray) -> int:
        """Pages that `adopt` would find for this text (int32 [n])."""
        return len(self._find(keys, token_ids))

    def adopt(self, owner: Hashable, keys: PageKeys, token_ids: np.ndarray) -> int:
        """Start a new owner with the known pages that its text begins with.

        The last token is never among them: its row has to run for there to be logits.

        Returns:
            Tokens that are committed with it, a multiple of PAGE_SIZE; 0: nothing has changed.
        """
        assert owner not in self._holdings, owner
        pages = self._find(keys, token_ids)
        if not pages:
            return 0
        count = len(pages)
        self._index.use(pages)
        table = np.array(pages, np.int32)
        self._num_owners[table] += 1
        self._holdings[owner] = _Holding(table, count, count * PAGE_SIZE, count)
        return count * PAGE_SIZE

    def forget(self) -> None:
        """No page is known any more: what they held is gone, or no longer true."""
        self._set_free(np.array(self._index.clear(), np.int32))

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
        """Assert that every page is free, known, or owned as often as is counted.

        What may still be written to has one owner, who is not to be found by others.
        """
        num_owners = np.zeros(self.num_pages, np.int64)
        for owner, holding in self._holdings.items():
            pages = holding.table[: holding.num_pages]
            assert ((pages >= 0) & (pages < self.num_pages)).all(), (owner, pages)
            np.add.at(num_owners, pages, 1)
            assert holding.num_reserved >= 0, (owner, holding)
        self._index.check_integrity(set(np.flatnonzero(num_owners == 0).tolist()))
        is_known = np.zeros(self.num_pages, np.bool_)
        is_known[self._index.pages] = True
        for owner, holding in self._holdings.items():
            written = holding.table[holding.num_committed // PAGE_SIZE : holding.num_pages]
            shared = written[(num_owners[written] > 1) | is_known[written]]
            assert not len(shared), f"{owner} writes to pages {shared.tolist()} of others"
        is_free = (num_owners == 0) & ~is_known
        wrong = (num_owners != self._num_owners) | (is_free != self._is_free[: self.num_pages])
        found = np.flatnonzero(wrong).tolist()
        assert not found, f"pages {found} are leaked or have several owners"
        assert self._num_empty == int(is_free.sum()), self._num_empty

    def _find(self, keys: PageKeys, token_ids: np.ndarray) -> list[int]:
        if not self._index:
            return []
        return self._index.find(keys.first((len(token_ids) - 1) // PAGE_SIZE, token_ids))

    def _grow(self, holding: _Holding, wanted: int) -> None:
        if wanted > self._num_empty:
            short = wanted - self._num_empty
            evicted = self._index.evict(max(short, self.num_pages // EVICTED_SHARE))
            self._set_free(np.array(evicted, np.int32))
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
        self._num_owners[start : start + taken] = 1
        holding.table[holding.num_pages : holding.num_pages + taken] = np.arange(
            start, start + taken, dtype=np.int32
        )
        holding.num_pages += taken
        self._num_empty -= taken
        return wanted - taken

    def _start_of_run(self, wanted: int) -> int:
        edges = np.diff(self._is_free.astype(np.int8), prepend=0)
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        largest = int((ends - starts).argmax())
        start, length = int(starts[largest]), int(ends[largest] - starts[largest])
        slack = max(0, length - wanted)
        return start if start == 0 else start + slack // 2

    def _free(self, pages: np.ndarray) -> None:
        """One owner less; pages that have none any more stay known, or become free."""
        assert (self._num_owners[pages] > 0).all(), f"pages {pages.tolist()} were already free"
        self._num_owners[pages] -= 1
        pages = pages[self._num_owners[pages] == 0]
        if self._index:
            known = np.array([page in self._index for page in pages.tolist()], np.bool_)
            for page in pages[known][::-1].tolist():  # the end of a text is given up first
                self._index.leave(page)
            pages = pages[~known]
        self._set_free(pages)

    def _set_free(self, pages: np.ndarray) -> None:
        self._is_free[pages] = True
        self._num_empty += len(pages)
