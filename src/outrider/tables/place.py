"""From entries to filter and buckets: which to keep, where each goes, in bounded memory."""

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from outrider.errors import TableError
from outrider.native import library, pointer
from outrider.tables.format import BLOCK_BYTES, MAX_BUCKETS, Contents, Layout, Region
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


class EntryStore:
    """Entries in memory, and in a file beyond `budget` bytes."""

    def __init__(self, budget: int, directory: Path | None = None) -> None:
        self.budget, self.directory = budget, directory
        self.count = 0
        self._arrays: list[np.ndarray] = []
        self._path: Path | None = None

    def add(self, entries: np.ndarray) -> None:
        self.count += len(entries)
        self._arrays.append(entries)
        if self.directory is not None and sum(a.nbytes for a in self._arrays) > self.budget:
            self._path = self.directory / "entries"
            with self._path.open("ab") as file:
                for array in self._arrays:
                    array.tofile(file)
            self._arrays = []

    def chunks(self) -> Iterator[np.ndarray]:
        """All entries, in pieces; views that must not be changed."""
        if self._path is not None:
            size = max(1, self.budget // 4 // ENTRY.itemsize)
            with self._path.open("rb") as file:
                while len(chunk := np.fromfile(file, ENTRY, size)):
                    yield chunk
        yield from self._arrays


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

    def keeps(self, entries: np.ndarray) -> np.ndarray:
        is_among = (entries["key"] >> np.uint64(8)) < np.uint64(self.share * (1 << HASH_BITS))
        return (entries["value"] > self.value) | ((entries["value"] == self.value) & is_among)


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
    contents = Contents(
        layout, np.zeros(layout.num_blocks * BLOCK_WORDS, np.uint32), _space(store, layout)
    )
    first_block = first_bucket = 0
    written = np.zeros(17, np.int64)  # slots, then contexts by key length
    for index, region in enumerate(regions):
        words = contents.filter[first_block * BLOCK_WORDS :][: region.num_blocks * BLOCK_WORDS]
        buckets = contents.buckets[first_bucket : first_bucket + region.num_buckets]
        for low, entries in _sorted_parts(store, cut, hot, index == 0, region, bits):
            _fill(entries, low, bits, layout, region, buckets, words, written)
        first_block += region.num_blocks
        first_bucket += region.num_buckets
    by_length = written[1:].tolist()
    return Placed(contents, sum(by_length), int(written[0]), by_length)


def _space(store: EntryStore, layout: Layout) -> np.ndarray:
    """Zeroed buckets, in a file where the entries may not fit into memory."""
    shape = (layout.num_buckets, BUCKET_BYTES)
    if store.directory is None or layout.bucket_bytes <= store.budget // 2:
        return np.zeros(shape, np.uint8)
    return np.memmap(store.directory / "buckets", np.uint8, "w+", 0, shape)


def _cut_for(store: EntryStore, layout: Layout, max_bytes: int | None) -> _Cut:
    if max_bytes is None:
        return _Cut(0, 1.0)
    if max_bytes < SMALLEST:
        raise TableError(f"a table takes at least {SMALLEST} bytes, the maximum is {max_bytes}")
    slots, contexts = (np.zeros(1 << 16) for _ in range(2))
    for chunk in store.chunks():
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
    for chunk in store.chunks():
        kept = chunk[cut.keeps(chunk)]
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


def _sorted_parts(
    store: EntryStore, cut: _Cut, hot: int, is_hot: bool, region: Region, bits: int
) -> Iterator[tuple[int, np.ndarray]]:
    """The entries of a region by ranges of buckets that fit into memory, with the first bucket."""
    total = store.count * ENTRY.itemsize
    num_parts = 1 if store.directory is None else max(1, -(-3 * total // max(1, store.budget)))
    bounds = [region.num_buckets * part // num_parts for part in range(num_parts + 1)]
    for low, high in itertools.pairwise(bounds):
        picked = []
        for chunk in store.chunks():
            mine = chunk[cut.keeps(chunk) & ((chunk["heat"] >= hot) == is_hot)]
            if num_parts > 1:
                buckets, _ = places_of(_cut_hashes(mine, bits), bits, region.num_buckets)
                mine = mine[(buckets >= np.uint64(low)) & (buckets < np.uint64(high))]
            picked.append(mine)
        yield low, sort_entries(np.concatenate(picked) if picked else np.empty(0, ENTRY))


def _cut_hashes(entries: np.ndarray, bits: int) -> np.ndarray:
    return entries["key"] >> np.uint64(8 + HASH_BITS - bits)


def _fill(
    entries: np.ndarray,
    low: int,
    bits: int,
    layout: Layout,
    region: Region,
    buckets: np.ndarray,
    words: np.ndarray,
    written: np.ndarray,
) -> None:
    """Write sorted entries into the buckets from `low` on, and their contexts into the filter."""
    lib = library()
    if lib is None:
        _fill_plainly(entries, bits, layout, region, buckets, words, written)
        return
    lib.outrider_table_place(
        pointer(entries),
        ctypes.c_int64(len(entries)),
        bits,
        layout.token_bytes,
        *(ctypes.c_uint64(n) for n in (low, region.num_buckets, region.num_blocks)),
        pointer(buckets[low:]),
        pointer(words),
        pointer(written),
    )


def _fill_plainly(
    entries: np.ndarray,
    bits: int,
    layout: Layout,
    region: Region,
    buckets: np.ndarray,
    words: np.ndarray,
    written: np.ndarray,
) -> None:
    if not len(entries):
        return
    hashes = _cut_hashes(entries, bits)
    places, tags = places_of(hashes, bits, region.num_buckets)
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
