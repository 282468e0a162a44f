"""From entries to filter and buckets: which to keep, where each goes, in bounded memory."""

import ctypes
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np

from outrider.checks import integer
from outrider.errors import TableError
from outrider.native import library, pointer
from outrider.tables.files import Scratch
from outrider.tables.format import (
    BLOCK_BYTES,
    PAGE,
    Contents,
    Layout,
    Region,
    file_bytes,
    mapped,
    section_places,
)
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
from outrider.tables.header import MAX_BUCKETS
from outrider.tables.records import ENTRY, sort_entries

# Entries per slot. A bucket that overflows loses what was seen least, 4 % of the entries at 0.8.
# Between 0.6 and 1.15 that changes the accepted tokens by less than 2 %, at a fixed size by 3 %.
LOAD = 0.8
# For tables made of tables, where nothing limits their size: 0.6 % of the entries are lost, and
# 3 % where most contexts have several continuations, which are lost together.
ROOMY_LOAD = 0.65
LOADS_TRIED = 16  # between the two, for the loosest that a maximum size allows
FILTER_BITS_PER_CONTEXT = 8  # 3 % of the contexts that are not there pass
HOT_SHARE = 0.1  # of the slots, those looked up most, that come first in the file
MIN_BUCKETS = 16
WAS_HOT = 1 << 15  # the sign of a heat: above that of all others
SMALLEST = (16 << 10) + 2 * MIN_BUCKETS * BUCKET_BYTES  # a size most tables can be made to fit

SCATTER = np.uint64(0x9E3779B97F4A7C15)
NUM_PARTS = 256  # of the entries in a file, by hash, so that each fits into memory
PART_BOUNDS = np.arange(NUM_PARTS + 1, dtype=np.uint64) << np.uint64(HASH_BITS - 8)


class EntryStore:
    """Entries in memory; beyond `budget` bytes in a file, sorted piece by piece."""

    def __init__(self, budget: int = 0, scratch: Scratch | None = None) -> None:
        self.budget, self.scratch = budget, scratch
        self._arrays: list[np.ndarray] = []
        self._is_sorted = False
        self._num_bytes = 0
        self._file: BinaryIO | None = None
        self._segments: list[np.ndarray] = []  # of the file, by part: first entry and end

    def add(self, entries: np.ndarray) -> None:
        self._arrays.append(entries)
        self._is_sorted = False
        self._num_bytes += entries.nbytes
        if self.scratch is not None and self._num_bytes > self.budget:
            self._spill(self.scratch)

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """All entries, sorted, in pieces of ascending hashes; with the first hash beyond each."""
        if self._file is not None and self.scratch is not None:
            if self._arrays:
                self._spill(self.scratch)
            for part, end in enumerate(PART_BOUNDS[1:].tolist()):
                yield end, sort_entries(self._read(self._file, part))
            return
        if not self._is_sorted:
            whole = np.concatenate([np.empty(0, ENTRY), *self._arrays])
            self._arrays, self._is_sorted = [sort_entries(whole)], True
        yield 1 << HASH_BITS, self._arrays[0]

    def _spill(self, scratch: Scratch) -> None:
        entries = sort_entries(np.concatenate(self._arrays))
        self._arrays, self._num_bytes = [], 0
        if self._file is None:
            self._file = scratch.open()
        first = self._file.seek(0, 2) // ENTRY.itemsize
        scratch.write(self._file, entries)
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
    # Contexts that were there and are not: their bucket was full of what was seen more often.
    num_overflowed: int = 0
    num_beyond_size: int = 0  # contexts left out to keep a maximum size

    @property
    def left_out(self) -> dict[str, int]:
        """How many contexts are missing, by reason."""
        return {"full_buckets": self.num_overflowed, "max_bytes": self.num_beyond_size}


@dataclass(frozen=True, slots=True)
class Sizing:
    """How large a table is to be.

    Args:
        max_bytes: of more, the contexts of least value are left out.
        load: entries per slot where that leaves nothing out.
        origin: regions of the table that the entries are from. The result has no more buckets,
            and where it has as many, each entry stays in its own: WAS_HOT in its heat says that
            it was in the first region.
        fields: of the header, whose length counts.
    """

    max_bytes: int | None = None
    load: float = LOAD
    origin: tuple[Region, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            integer("max_bytes", self.max_bytes, 1, error=TableError)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Keeps entries above a value, and of those that have it a share (by hash)."""

    value: int
    share: float

    def kept(self, entries: np.ndarray) -> np.ndarray:
        if self.value == 0 and self.share == 1:
            return entries
        # The share is by hash, but scattered: buckets go by hash, and are to lose alike.
        scattered = (entries["key"] >> np.uint64(8)) * SCATTER >> np.uint64(64 - HASH_BITS)
        is_among = scattered < np.uint64(self.share * (1 << HASH_BITS))
        is_at = entries["value"] == self.value
        return entries[(entries["value"] > self.value) | (is_at & is_among)]


def place(
    store: EntryStore,
    key_lengths: tuple[int, ...],
    token_bytes: int,
    sizing: Sizing | None = None,
    known_bits: int = HASH_BITS,
) -> Placed:
    """Sort entries into buckets; of more than `sizing.max_bytes` those of the least value go.

    `known_bits`: how many upper bits of the hashes are known; those after them are zero.

    Raises:
        TableError: more entries than a table can hold, or a maximum that no table fits.
    """
    plain = Layout(key_lengths, known_bits, token_bytes, ())
    plan = _planned(store, plain, sizing or Sizing())
    layout, cut = plan.layout, plan.cut
    words = np.zeros(layout.num_blocks * BLOCK_WORDS, np.uint32)
    written = np.zeros(17, np.int64)  # slots, then contexts by key length
    with _Space(store, layout) as space:
        fillers = _fillers(layout, words, space, written)
        for end, entries in store.parts():
            kept = cut.kept(entries)
            is_hot = kept["heat"] >= plan.hot
            for filler, mine in zip(fillers, (kept[is_hot], kept[~is_hot]), strict=True):
                filler.add(mine, end)
        by_length = written[1:].tolist()
        contents = Contents(layout, words, *space.finish())
    num_contexts = sum(by_length)
    return Placed(
        contents,
        num_contexts,
        int(written[0]),
        by_length,
        plan.num_kept - num_contexts,
        plan.num_contexts - plan.num_kept,
    )


class _Space:
    """The buckets while they are filled: in memory, or in a file that is mapped when complete."""

    def __init__(self, store: EntryStore, layout: Layout) -> None:
        self._shape = (layout.num_buckets, BUCKET_BYTES)
        self._array: np.ndarray | None = None
        self._file: BinaryIO | None = None
        self._scratch = store.scratch
        if store.scratch is None or layout.bucket_bytes <= store.budget // 2:
            self._array = np.zeros(self._shape, np.uint8)
        else:
            self._file = store.scratch.open()

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
        assert self._file is not None and self._scratch is not None
        self._file.seek(first_bucket * BUCKET_BYTES)
        self._scratch.write(self._file, buckets)

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


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which entries go where."""

    cut: _Cut
    hot: int  # entries of this heat or more go into the first region
    layout: Layout
    num_contexts: int
    num_kept: int  # of them


def _planned(store: EntryStore, plain: Layout, sizing: Sizing) -> _Plan:
    everything = _Cut(0, 1.0)
    hot, sizes = _measure(store, everything)
    num_contexts = sum(contexts for _, contexts in sizes)
    roomy = _regions(sizes, plain, sizing.load)
    origin = sizing.origin
    if origin and sum(r.num_buckets for r in origin) <= sum(r.num_buckets for r in roomy):
        hot, roomy = WAS_HOT, origin
    layout = _with_regions(plain, roomy)
    if sizing.max_bytes is None or file_bytes(layout, sizing.fields) <= sizing.max_bytes:
        _check_regions(roomy, sizes, layout)
        return _Plan(everything, hot, layout, num_contexts, num_contexts)
    cut = _cut_for(store, plain, sizing.max_bytes, sizing.fields)
    hot, sizes = _measure(store, cut)
    layout = plain
    for load in np.linspace(sizing.load, LOAD, LOADS_TRIED):
        layout = _with_regions(plain, _regions(sizes, plain, load))
        if file_bytes(layout, sizing.fields) <= sizing.max_bytes:
            break
    _check_regions(layout.regions, sizes, layout)
    return _Plan(cut, hot, layout, num_contexts, sum(contexts for _, contexts in sizes))


def _with_regions(plain: Layout, regions: tuple[Region, ...]) -> Layout:
    bits = min(plain.hash_bits, *(hash_bits_for(region.num_buckets) for region in regions))
    return replace(plain, hash_bits=bits, regions=regions)


def _cut_for(store: EntryStore, layout: Layout, max_bytes: int, fields: Mapping[str, Any]) -> _Cut:
    # Either region may take MIN_BUCKETS for less, both round up, and so do the filter and a page.
    nothing = _with_regions(layout, (Region(1, 1), Region(1, MIN_BUCKETS)))
    base = section_places(nothing, fields)[0] + nothing.filter_bytes + PAGE + nothing.bucket_bytes
    least = base + MIN_BUCKETS * BUCKET_BYTES
    if max_bytes < least:
        raise TableError(f"a table takes at least {least} bytes, the maximum is {max_bytes}")
    slots, contexts = (np.zeros(1 << 16) for _ in range(2))
    for _, chunk in store.parts():
        slots += np.bincount(chunk["value"], minlength=1 << 16)
        first = chunk["key"] & np.uint64(15) == 0
        contexts += np.bincount(chunk["value"][first], minlength=1 << 16)
    per_slot = BUCKET_BYTES / (layout.slots_per_bucket * LOAD)
    sizes = slots * per_slot + contexts * FILTER_BITS_PER_CONTEXT / 8
    above = np.concatenate([np.cumsum(sizes[::-1])[::-1], [0.0]])  # bytes of values from here on
    room = max_bytes - base
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


def _regions(sizes: list[tuple[int, int]], layout: Layout, load: float) -> tuple[Region, ...]:
    """Regions for so many slots and contexts each."""
    return tuple(
        Region(
            num_contexts * FILTER_BITS_PER_CONTEXT // (8 * BLOCK_BYTES) + 1,
            max(MIN_BUCKETS, int(num_slots / (load * layout.slots_per_bucket)) + 1),
        )
        for num_slots, num_contexts in sizes
    )


def _check_regions(
    regions: tuple[Region, ...], sizes: list[tuple[int, int]], layout: Layout
) -> None:
    if any(region.num_buckets > MAX_BUCKETS for region in regions):
        raise TableError(
            f"a table holds at most {MAX_BUCKETS * layout.slots_per_bucket} entries, got "
            f"{max(num_slots for num_slots, _ in sizes)}: raise the minimum count or give a "
            "maximum size"
        )


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
