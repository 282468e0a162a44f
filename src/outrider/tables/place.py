"""From entries to filter and buckets: which to keep, where each goes, in bounded memory."""

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from outrider.errors import TableError
from outrider.native import library, pointer
from outrider.tables.format import BLOCK_BYTES, MAX_BUCKETS, Contents, Layout, Region, mapped
from outrider.tables.hashing import (
    BLOCK_WORDS,
    BUCKET_BYTES,
    HASH_BITS,
    blocks_of,
    filter_bits,
    hash_bits_for,
    packed,
    places_of,
)
from outrider.tables.records import ENTRY, sort_entries

# Entries per slot. A bucket that overflows loses what was seen least, 4 % of the entries at 0.8.
# Between 0.6 and 1.15 that changes the accepted tokens by less than 2 %, at a fixed size by 3 %.
LOAD = 0.8
FILTER_BITS_PER_CONTEXT = 8  # 3 % of the contexts that are not there pass
HOT_SHARE = 0.1  # of the slots, those looked up most, that come first in the file
MIN_BUCKETS = 16
HEADER_BYTES = 16384  # room for the header when a table has to fit a size
SMALLEST = HEADER_BYTES + 2 * MIN_BUCKETS * BUCKET_BYTES  # a size a table can be made to fit

NUM_PARTS = 256  # of the entries in a file, by hash, so that each fits into memory
PART_BOUNDS = np.arange(NUM_PARTS + 1, dtype=np.uint64) << np.uint64(HASH_BITS - 8)


class EntryStore:
    """Entries in memory; beyond `budget` bytes in a file, sorted piece by piece."""

    def __init__(self, budget: int = 0, directory: Path | None = None) -> None:
        self.budget, self.directory = budget, directory
        self._arrays: list[np.ndarray] = []
        self._is_sorted = False
        self._num_bytes = 0
        self._segments: list[np.ndarray] = []  # of the file, by part: first entry and end

    def add(self, entries: np.ndarray) -> None:
        self._arrays.append(entries)
        self._is_sorted = False
        self._num_bytes += entries.nbytes
        if self.directory is not None and self._num_bytes > self.budget:
            self._spill(self.directory / "entries")

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """All entries, sorted, in pieces of ascending hashes; with the first hash beyond each."""
        if self._segments and self.directory is not None:
            if self._arrays:
                self._spill(self.directory / "entries")
            with (self.directory / "entries").open("rb") as file:
                for part, end in enumerate(PART_BOUNDS[1:].tolist()):
                    yield end, sort_entries(self._read(file, part))
            return
        if not self._is_sorted:
            whole = np.concatenate([np.empty(0, ENTRY), *self._arrays])
            self._arrays, self._is_sorted = [sort_entries(whole)], True
        yield 1 << HASH_BITS, self._arrays[0]

    def _spill(self, path: Path) -> None:
        entries = sort_entries(np.concatenate(self._arrays))
        self._arrays, self._num_bytes = [], 0
        try:
            with path.open("ab") as file:
                first = file.tell() // ENTRY.itemsize
                entries.tofile(file)
        except OSError as error:
            raise TableError(f"cannot write temporary files: {error.strerror or error}") from error
        self._segments.append(first + np.searchsorted(entries["key"] >> np.uint64(8), PART_BOUNDS))

    def _read(self, file: BinaryIO, part: int) -> np.ndarray:
        pieces = []
        for segment in self._segments:
            first, end = segment[part : part + 2].tolist()
            file.seek(first * ENTRY.itemsize)
            pieces.append(np.fromfile(file, ENTRY, end - first))
        return np.concatenate(pieces)


@dataclass(slots=True)
class Placed:
    """A table's contents, and what did not fit."""

    contents: Contents
    num_contexts: int
    num_slots: int
    contexts_by_length: list[int] = field(default_factory=list)  # index: key length


@dataclass(frozen=True, slots=True)
class _Cut:
    """Keeps entries above a value, and of those that have it a share (by hash)."""

    value: int
    share: float

    def kept(self, entries: np.ndarray) -> np.ndarray:
        if self.value == 0 and self.share == 1:
            return entries
        is_among = (entries["key"] >> np.uint64(8)) < np.uint64(self.share * (1 << HASH_BITS))
        is_at = entries["value"] == self.value
        return entries[(entries["value"] > self.value) | (is_at & is_among)]


def place(
    store: EntryStore,
    key_lengths: tuple[int, ...],
    token_bytes: int,
    max_bytes: int | None = None,
    known_bits: int = HASH_BITS,
) -> Placed:
    """Sort entries into buckets; of more than `max_bytes` those of the least value go.

    `known_bits`: how many upper bits of the hashes are known; those after them are zero.

    Raises:
        TableError: more entries than a table can hold, or a maximum that no table fits.
    """
    layout = Layout(key_lengths, HASH_BITS, token_bytes, ())
    cut = _cut_for(store, layout, max_bytes)
    hot, sizes = _measure(store, cut)
    regions = tuple(_region(*size, layout) for size in sizes)
    bits = min(known_bits, *(hash_bits_for(region.num_buckets) for region in regions))
    layout = Layout(key_lengths, bits, token_bytes, regions)
    words = np.zeros(layout.num_blocks * BLOCK_WORDS, np.uint32)
    written = np.zeros(17, np.int64)  # slots, then contexts by key length
    with _Space(store, layout) as space:
        fillers = _fillers(layout, words, space, written)
        for end, entries in store.parts():
            kept = cut.kept(entries)
            is_hot = kept["heat"] >= hot
            for filler, mine in zip(fillers, (kept[is_hot], kept[~is_hot]), strict=True):
                filler.add(mine, end)
        by_length = written[1:].tolist()
        contents = Contents(layout, words, *space.finish())
    return Placed(contents, sum(by_length), int(written[0]), by_length)


class _Space:
    """The buckets while they are filled: in memory, or in a file that is mapped when complete."""

    def __init__(self, store: EntryStore, layout: Layout) -> None:
        self._shape = (layout.num_buckets, BUCKET_BYTES)
        self._array: np.ndarray | None = None
        self._file: BinaryIO | None = None
        if store.directory is None or layout.bucket_bytes <= store.budget // 2:
            self._array = np.zeros(self._shape, np.uint8)
        else:
            self._file = (store.directory / "buckets").open("w+b")

    def __enter__(self) -> "_Space":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, first_bucket: int, buckets: np.ndarray) -> None:
        """Buckets [n, BUCKET_BYTES] to their place."""
        if self._array is not None:
            self._array[first_bucket : first_bucket + len(buckets)] = buckets
            return
        assert self._file is not None
        try:
            self._file.seek(first_bucket * BUCKET_BYTES)
            buckets.tofile(self._file)
        except OSError as error:
            raise TableError(f"cannot write temporary files: {error.strerror or error}") from error

    def finish(self) -> tuple[np.ndarray, mmap.mmap | None]:
        """All buckets, and the mapping behind them."""
        if self._array is not None:
            return self._array, None
        assert self._file is not None
        self._file.truncate(self._shape[0] * BUCKET_BYTES)
        return mapped(self._file, 0, self._shape)


@dataclass(slots=True)
class _Filler:
    """Fills the buckets of one region, from the first to the last."""

    region: Region
    first_bucket: int  # of the region, in the table
    layout: Layout
    words: np.ndarray  # of the region's part of the filter
    space: _Space
    written: np.ndarray
    low: int = 0  # bucket of the region to fill next
    left: np.ndarray = field(default_factory=lambda: np.empty(0, ENTRY))  # for buckets to come

    def add(self, entries: np.ndarray, end: int) -> None:
        """Take in sorted entries; all that come later have hashes of `end` or more."""
        entries = np.concatenate([self.left, entries]) if len(self.left) else entries
        bits, num_buckets = self.layout.hash_bits, self.region.num_buckets
        high = num_buckets
        if end < 1 << HASH_BITS:
            cut = np.array([end >> (HASH_BITS - bits)], np.uint64)
            high = int(places_of(cut, bits, num_buckets)[0][0])  # others may go there too
        buckets, _ = places_of(_cut_hashes(entries, bits), bits, num_buckets)
        count = int(np.searchsorted(buckets, high))
        self.left = entries[count:].copy()
        filled = np.zeros((high - self.low, BUCKET_BYTES), np.uint8)
        _fill(entries[:count], self.low, self.layout, self.region, filled, self.words, self.written)
        self.space.write(self.first_bucket + self.low, filled)
        self.low = high


def _fillers(
    layout: Layout, words: np.ndarray, space: _Space, written: np.ndarray
) -> list[_Filler]:
    fillers = []
    first_block = first_bucket = 0
    for region in layout.regions:
        mine = words[first_block * BLOCK_WORDS :][: region.num_blocks * BLOCK_WORDS]
        fillers.append(_Filler(region, first_bucket, layout, mine, space, written))
        first_block += region.num_blocks
        first_bucket += region.num_buckets
    return fillers


def _cut_for(store: EntryStore, layout: Layout, max_bytes: int | None) -> _Cut:
    if max_bytes is None:
        return _Cut(0, 1.0)
    if max_bytes < SMALLEST:
        raise TableError(f"a table takes at least {SMALLEST} bytes, the maximum is {max_bytes}")
    slots, contexts = (np.zeros(1 << 16) for _ in range(2))
    for _, chunk in store.parts():
        slots += np.bincount(chunk["value"], minlength=1 << 16)
        first = chunk["key"] & np.uint64(15) == 0
        contexts += np.bincount(chunk["value"][first], minlength=1 << 16)
    per_slot = BUCKET_BYTES / (layout.slots_per_bucket * LOAD)
    sizes = slots * per_slot + contexts * FILTER_BITS_PER_CONTEXT / 8
    above = np.concatenate([np.cumsum(sizes[::-1])[::-1], [0.0]])  # bytes of values from here on
    room = max_bytes - SMALLEST
    if above[0] <= room:
        return _Cut(0, 1.0)
    value = int(np.flatnonzero(above > room)[-1])
    return _Cut(value, max(0.0, (room - above[value + 1]) / sizes[value]))


def _measure(store: EntryStore, cut: _Cut) -> tuple[int, list[tuple[int, int]]]:
    """The heat from which on entries are hot; slots and contexts of the hot ones and the others."""
    slots, contexts = (np.zeros(1 << 16, np.int64) for _ in range(2))
    for _, chunk in store.parts():
        kept = cut.kept(chunk)
        slots += np.bincount(kept["heat"], minlength=1 << 16)
        first = kept["key"] & np.uint64(15) == 0
        contexts += np.bincount(kept["heat"][first], minlength=1 << 16)
    from_here = np.cumsum(slots[::-1])[::-1]
    fitting = np.flatnonzero(from_here <= HOT_SHARE * slots.sum())
    hot = int(fitting[0]) if len(fitting) else 1 << 16
    sizes = [(int(slots[s].sum()), int(contexts[s].sum())) for s in (slice(hot, None), slice(hot))]
    return hot, sizes


def _region(num_slots: int, num_contexts: int, layout: Layout) -> Region:
    num_buckets = max(MIN_BUCKETS, int(num_slots / (LOAD * layout.slots_per_bucket)) + 1)
    if num_buckets > MAX_BUCKETS:
        raise TableError(
            f"a table holds at most {MAX_BUCKETS * layout.slots_per_bucket} entries, got "
            f"{num_slots}: raise the minimum count or give a maximum size"
        )
    num_blocks = num_contexts * FILTER_BITS_PER_CONTEXT // (8 * BLOCK_BYTES) + 1
    return Region(num_blocks, num_buckets)


def _cut_hashes(entries: np.ndarray, bits: int) -> np.ndarray:
    return entries["key"] >> np.uint64(8 + HASH_BITS - bits)


def _fill(
    entries: np.ndarray,
    low: int,
    layout: Layout,
    region: Region,
    buckets: np.ndarray,
    words: np.ndarray,
    written: np.ndarray,
) -> None:
    """Write sorted entries into the buckets from `low` on, and their contexts into the filter."""
    lib = library()
    if lib is None:
        _fill_plainly(entries, low, layout, region, buckets, words, written)
        return
    lib.outrider_table_place(
        pointer(entries),
        ctypes.c_int64(len(entries)),
        layout.hash_bits,
        layout.token_bytes,
        *(ctypes.c_uint64(n) for n in (low, region.num_buckets, region.num_blocks)),
        pointer(buckets),
        pointer(words),
        pointer(written),
    )


def _fill_plainly(
    entries: np.ndarray,
    low: int,
    layout: Layout,
    region: Region,
    buckets: np.ndarray,
    words: np.ndarray,
    written: np.ndarray,
) -> None:
    if not len(entries):
        return
    bits = layout.hash_bits
    hashes = _cut_hashes(entries, bits)
    places, tags = places_of(hashes, bits, region.num_buckets)
    places = places.astype(np.int64) - low
    starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
    sizes = np.diff(np.append(starts, len(entries)))
    totals = np.repeat(
        entries["total"][starts].astype(np.int64), sizes
    )  # of the first, as compiled
    order = np.lexsort((np.arange(len(entries)), -totals, places))
    ordered = places[order]
    first_of = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    index = np.arange(len(order)) - np.repeat(first_of, np.diff(np.append(first_of, len(order))))
    order, index = order[index < layout.slots_per_bucket], index[index < layout.slots_per_bucket]
    chosen = entries[order]
    written[0] += len(chosen)
    is_first = np.isin(order, starts)
    lengths = (chosen["key"][is_first] >> np.uint64(4)) & np.uint64(15)
    written[1:] += np.bincount(lengths.astype(np.int64), minlength=16)
    columns = [(tags[order], 3), (chosen["token"], layout.token_bytes)]
    columns += [(packed(chosen[name]), 1) for name in ("count", "total")]
    at = index * layout.slot_bytes
    for values, num_bytes in columns:
        for byte in range(num_bytes):
            shifted = values.astype(np.uint64) >> np.uint64(8 * byte)
            buckets[places[order], at] = (shifted & np.uint64(255)).astype(np.uint8)
            at = at + 1
    contexts = hashes[starts]
    blocks = blocks_of(contexts, bits, region.num_blocks).astype(np.int64)
    rows = words.reshape(-1, BLOCK_WORDS)
    np.bitwise_or.at(rows, blocks, filter_bits(contexts))
