"""Finds full KV pages by the text they were computed for. Bookkeeping only: no tensor here.

A page's KV depends on its own tokens and on all before them, so a page is known by a hash of the
whole text up to its end. The chain of hashes begins with the tenant: the text of one tenant is
never found by another.
"""

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from outrider.target.base import PAGE_SIZE

KEY_BYTES = 16  # two texts of one tenant that share a key are not to be met: 2^-64 after 2^32 pages


class PageKeys:
    """The keys of one text's full pages, made as the text grows: 1 µs a page, each page once."""

    __slots__ = ("_keys",)

    def __init__(self, tenant: str) -> None:
        root = tenant.encode("utf-8", "surrogatepass")
        self._keys = [blake2b(root, digest_size=KEY_BYTES).digest()]

    def first(self, count: int, token_ids: np.ndarray) -> list[bytes]:
        """Keys of the first `count` pages of the text, int32 [n]; it may only have grown."""
        keys = self._keys
        for page in range(len(keys) - 1, count):
            tokens = token_ids[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
            assert tokens.dtype == np.int32 and len(tokens) == PAGE_SIZE, (page, tokens)
            keys.append(blake2b(keys[page] + tokens.tobytes(), digest_size=KEY_BYTES).digest())
        return keys[1 : count + 1]


class PrefixIndex:
    """Which page holds the KV of which text; pages without an owner wait here in order of use."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest unused first

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def __bool__(self) -> bool:
        return bool(self._key_of)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def pages(self) -> list[int]:
        return list(self._key_of)

    def add(self, key: bytes, page: int) -> None:
        """Make an owned page known; of two pages with the same text the first stays known."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest known beginning of a text."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def use(self, pages: Iterable[int]) -> None:
        """These pages have an owner now."""
        for page in pages:
            self._idle.pop(page, None)

    def leave(self, page: int) -> None:
        """The last owner of a known page went: of all that wait it was used most recently."""
        self._idle[page] = None

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` idle pages, those unused for longest, and return them."""
        evicted = [self._idle.popitem(last=False)[0] for _ in range(min(count, len(self._idle)))]
        for page in evicted:
            del self._page_of[self._key_of.pop(page)]
        return evicted

    def clear(self) -> list[int]:
        """Forget everything; returns the pages that nobody owned."""
        idle = list(self._idle)
        self._page_of.clear()
        self._key_of.clear()
        self._idle.clear()
        return idle

    def check_integrity(self, unowned: set[int]) -> None:
        """Assert that keys and pages are one to one, and that those without an owner are idle."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert set(self._idle) == unowned & set(self._key_of), (self._idle, unowned)
