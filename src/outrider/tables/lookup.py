"""Drafts out of a table for a whole batch: one call into the compiled library, or numpy.

A draft grows from its likeliest end: the longest key that the table has there gives continuations
with their confidence, and the likeliest continuation of all joins the draft, until the budget is
spent or nothing likely is left. With one branch that is a chain, with more a tree.
"""

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.native import library
from outrider.tables.format import Contents
from outrider.tables.hashing import (
    BLOCK_WORDS,
    BUCKET_BYTES,
    HASH_BITS,
    MAX_KEY,
    NUM_CELLS,
    blocks_of,
    cells_of,
    context_hashes,
    filter_bits,
    places_of,
    unpacked,
)

MIN_FAILURE, MAX_FAILURE = 0.005, 0.98  # no confidence beyond them; as in table.cpp
MAX_WIDTH, MAX_BRANCHES = 64, 4
MAX_KEYS = 2  # asked for one context; as in table.cpp, which says why
HOT, COLD, NOWHERE = range(3)  # who answered a lookup


class _Region(ctypes.Structure):
    _fields_ = (
        ("filter", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("num_blocks", "first_bucket", "num_buckets")),
    )


class _Call(ctypes.Structure):
    """The layout of `Call` in native/table.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hot", "cold")),
        ("regions", _Region * 2),
        ("num_hot", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("answered", "table", "contexts", "budgets")),
        *((name, ctypes.c_void_p) for name in ("factors", "tokens", "parents", "cells")),
        *((name, ctypes.c_void_p) for name in ("confidence", "lengths")),
        ("key_lengths", ctypes.c_int32 * MAX_KEY),
        *((name, ctypes.c_int32) for name in ("max_key", "hash_bits", "token_bytes")),
        *((name, ctypes.c_int32) for name in ("width", "branches")),
        ("min_survival", ctypes.c_float),
    )


@dataclass(slots=True)
class Found:
    """Drafts of a batch, lengths[i] tokens in row i; the next call writes into the same arrays."""

    tokens: np.ndarray  # int32 [n, width]
    parents: np.ndarray  # int32 [n, width], -1: the context
    cells: np.ndarray  # int32 [n, width], of the confidence; -1: from a shorter key
    confidence: np.ndarray  # float32 [n, width]
    lengths: np.ndarray  # int32 [n]


@dataclass(slots=True)
class _Candidate:
    """A continuation that may come into a draft."""

    survival: np.float32  # -1: it is in the draft
    confidence: np.float32
    token: int
    parent: int
    cell: int


class TableLookup:
    """Looks contexts up in a table.

    Args:
        contents: of an open table.
        confidence: float32 [NUM_CELLS], of each cell; may change between calls.
        width: longest draft.
        branches: continuations of one context that a draft may hold.
        min_survival: a draft holds no token that is accepted less often than this.
        hot_bytes: memory for the buckets used most, locked where the system lets it; a copy of
            them where they are mapped.
    """

    def __init__(
        self,
        contents: Contents,
        confidence: np.ndarray,
        width: int,
        branches: int = 1,
        min_survival: float = 0.0,
        hot_bytes: int = 0,
    ) -> None:
        assert 1 <= width <= MAX_WIDTH and 1 <= branches <= MAX_BRANCHES, (width, branches)
        self.contents, self.layout = contents, contents.layout
        self.width, self.branches, self.min_survival = width, branches, min_survival
        self.max_key = max(contents.layout.key_lengths)
        self._dropped_bits = np.uint64(HASH_BITS - contents.layout.hash_bits)
        self.confidence = confidence
        assert self.confidence.dtype == np.float32 and len(self.confidence) == NUM_CELLS
        self.num_hot = min(contents.layout.num_buckets, hot_bytes // BUCKET_BYTES)
        self.hot = contents.buckets[: self.num_hot]
        if contents.mapping is not None:
            self.hot = self.hot.copy()
        lock(self.hot)
        self.answered = np.zeros(3, np.uint64)  # lookups so far by HOT, COLD, NOWHERE
        self.contexts = np.zeros((0, self.max_key), np.int32)
        self._library = library()
        if self._library is not None:
            self._draft = self._library.outrider_table_draft
            self._draft.argtypes = [ctypes.c_void_p, ctypes.c_int32]
            self._call = self._new_call()
        self.make_room(16)

    def make_room(self, num_requests: int) -> None:
        """Arrays for that many requests; `contexts`, `budgets` and `factors` are to be filled."""
        if num_requests <= len(self.contexts):
            return
        shape = (num_requests, self.width)
        self.contexts = np.full((num_requests, self.max_key), -1, np.int32)
        self.budgets = np.zeros(num_requests, np.int32)
        self.factors = np.ones(num_requests, np.float32)
        self.found = Found(
            tokens=np.zeros(shape, np.int32),
            parents=np.zeros(shape, np.int32),
            cells=np.zeros(shape, np.int32),
            confidence=np.zeros(shape, np.float32),
            lengths=np.zeros(num_requests, np.int32),
        )
        found = self.found
        # Reading numbers through views costs half of what it costs through numpy.
        self.views: tuple[Any, ...] = tuple(
            array.reshape(-1).data
            for array in (found.tokens, found.parents, found.cells, found.confidence)
        )
        if self._library is not None:
            self._point()

    def draft(self, num_requests: int) -> Found:
        """Drafts for the first `num_requests` rows of `contexts`: int32, newest token first."""
        assert num_requests <= len(self.contexts), (num_requests, len(self.contexts))
        if self._library is not None:
            self._draft(self._address, num_requests)
        else:
            for row in range(num_requests):
                self._draft_one(row)
        return self.found

    def _new_call(self) -> _Call:
        layout = self.layout
        first_block = first_bucket = 0
        regions = []
        for region in layout.regions:
            address = self.contents.filter.ctypes.data + 4 * BLOCK_WORDS * first_block
            regions.append(_Region(address, region.num_blocks, first_bucket, region.num_buckets))
            first_block += region.num_blocks
            first_bucket += region.num_buckets
        return _Call(
            hot=self.hot.ctypes.data,
            cold=self.contents.buckets.ctypes.data,
            regions=(_Region * 2)(*regions),
            num_hot=self.num_hot,
            answered=self.answered.ctypes.data,
            table=self.confidence.ctypes.data,
            key_lengths=(ctypes.c_int32 * MAX_KEY)(*layout.key_lengths),
            max_key=self.max_key,
            hash_bits=layout.hash_bits,
            token_bytes=layout.token_bytes,
            width=self.width,
            branches=self.branches,
            min_survival=self.min_survival,
        )

    def _point(self) -> None:
        call, found = self._call, self.found
        call.contexts, call.budgets = self.contexts.ctypes.data, self.budgets.ctypes.data
        call.factors = self.factors.ctypes.data
        call.tokens, call.parents = found.tokens.ctypes.data, found.parents.ctypes.data
        call.cells, call.confidence = found.cells.ctypes.data, found.confidence.ctypes.data
        call.lengths = found.lengths.ctypes.data
        self._address = ctypes.addressof(call)

    def _draft_one(self, row: int) -> None:
        found = self.found
        candidates: list[_Candidate] = []
        survivals: list[np.float32] = []
        context = [token for token in self.contexts[row].tolist() if token >= 0]
        budget = min(int(self.budgets[row]), self.width)
        node, paths = -1, {-1: context}
        while len(survivals) < budget:
            above = survivals[node] if node >= 0 else np.float32(1)
            for token, confidence, cell in self._continuations(paths[node], self.factors[row]):
                candidates.append(_Candidate(above * confidence, confidence, token, node, cell))
            best = max(candidates, key=lambda candidate: candidate.survival, default=None)
            if best is None or best.survival < max(np.float32(self.min_survival), 0):
                break
            node = len(survivals)
            survivals.append(best.survival)
            paths[node] = [best.token, *paths[best.parent]][: self.max_key]
            found.tokens[row, node], found.parents[row, node] = best.token, best.parent
            found.cells[row, node], found.confidence[row, node] = best.cell, best.confidence
            best.survival = np.float32(-1)
        found.lengths[row] = len(survivals)

    def _continuations(
        self, context: list[int], factor: np.float32
    ) -> list[tuple[int, np.float32, int]]:
        """Tokens, confidences and cells: after the longest key that the table has, and where
        that has too few, after the next one, for the case that it fails."""
        hashes = context_hashes(np.array([context or [0]], np.int32))[0]
        found: list[tuple[int, np.float32, int]] = []
        num_keys, answered = 0, NOWHERE
        for length in reversed(self.layout.key_lengths):
            if length > len(context) or len(found) >= self.branches or num_keys == MAX_KEYS:
                continue
            slots, tier = self._slots(hashes[length - 1 : length] >> self._dropped_bits)
            if not len(slots):
                continue
            left = np.float32(1)
            for _, confidence, _ in found:
                left -= confidence
            known = [token for token, _, _ in found]
            for token, confidence, cell in self._judge(slots, length, factor):
                if token not in known and len(found) < self.branches:
                    confidence *= max(np.float32(0), left)
                    found.append((token, confidence, -1 if known else cell))
            answered = tier if not num_keys else answered
            num_keys += 1
        self.answered[answered] += 1
        return found

    def _slots(self, hashes: np.ndarray) -> tuple[np.ndarray, int]:
        """Token, count and total of the continuations of one hash, and which tier has them."""
        first_block = first_bucket = 0
        for region in self.layout.regions:
            block = first_block + int(
                blocks_of(hashes, self.layout.hash_bits, region.num_blocks)[0]
            )
            words = self.contents.filter[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
            first_block += region.num_blocks
            if (words & filter_bits(hashes)[0] == filter_bits(hashes)[0]).all():
                buckets, tags = places_of(hashes, self.layout.hash_bits, region.num_buckets)
                bucket = first_bucket + int(buckets[0])
                tier = HOT if bucket < self.num_hot else COLD
                rows = (self.hot if tier == HOT else self.contents.buckets)[bucket]
                slots = read_slots(rows[None], self.layout.token_bytes)[0]
                slots = slots[(slots[:, 0] == int(tags[0])) & (slots[:, 2] > 0)]
                if len(slots):
                    return slots[:, 1:], tier
            first_bucket += region.num_buckets
        return np.empty((0, 3), np.int64), NOWHERE

    def _judge(
        self, slots: np.ndarray, length: int, factor: np.float32
    ) -> list[tuple[int, np.float32, int]]:
        counts, totals = unpacked(slots[:, 1]), unpacked(slots[:, 2])
        cells = cells_of(np.full(len(slots), length), counts, totals)
        failure = (np.float32(1) - self.confidence[cells]) * factor
        confidence = np.float32(1) - failure.clip(np.float32(MIN_FAILURE), np.float32(MAX_FAILURE))
        return list(zip(slots[:, 0].tolist(), confidence, cells.tolist(), strict=True))


def read_slots(buckets: np.ndarray, token_bytes: int) -> np.ndarray:
    """Tag, token, packed count and packed total of each slot: int64 [n, slots, 4] of [n, 128]."""
    size = token_bytes + 5
    num_slots = BUCKET_BYTES // size
    raw = buckets[:, : num_slots * size].reshape(-1, num_slots, size).astype(np.int64)
    tags = raw[..., 0] | raw[..., 1] << 8 | raw[..., 2] << 16
    tokens = raw[..., 3] | raw[..., 4] << 8
    if token_bytes == 3:
        tokens |= raw[..., 5] << 16
    return np.stack([tags, tokens, raw[..., -2], raw[..., -1]], axis=-1)


def lock(buckets: np.ndarray) -> None:
    """Keep memory from being swapped out, where the system lets a process do so."""
    if buckets.nbytes:
        with contextlib.suppress(AttributeError, OSError):  # no such call on this system
            lock_pages = ctypes.CDLL(None).mlock
            lock_pages(ctypes.c_void_p(buckets.ctypes.data), ctypes.c_size_t(buckets.nbytes))
