"""Tables made of tables: `merge` adds their counts, `prune` leaves out what is worth least.

A table knows its contexts by their hashes only, and has counts to one part in sixteen; a merged
table is therefore close to the table of both corpora, not the same. Continuations that a build
left out stay out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import TableError
from outrider.tables.format import Contents, Table, write_table
from outrider.tables.hashing import HASH_BITS, MAX_RANKS, hashes_at, unpacked
from outrider.tables.lookup import read_slots
from outrider.tables.place import EntryStore, Placed, place
from outrider.tables.records import ENTRY, sort_entries

RANK_MASK = 15  # bits of an entry's key


def merge(
    first: Table,
    second: Table,
    path: Path,
    provenance: Mapping[str, Any],
    max_bytes: int | None = None,
    prefer_first: bool = False,
) -> None:
    """Write a table with the contexts of both.

    Args:
        max_bytes: of more, the contexts of least value are left out.
        prefer_first: a context that both have is taken from the first one alone: for a corpus
            that is closer to what the target writes than another, larger one.

    Raises:
        TableError: they were made for different tokenizers, or the file cannot be written.
    """
    if first.fingerprint != second.fingerprint:
        raise TableError(
            f"{first.path} was made for the tokenizer {first.fingerprint}, {second.path} for "
            f"{second.fingerprint}: only tables of one tokenizer can be merged"
        )
    bits = min(table.contents.layout.hash_bits for table in (first, second))
    ours, theirs = (entries_of(table.contents, bits) for table in (first, second))
    if prefer_first:
        theirs = theirs[~np.isin(_contexts_of(theirs), _contexts_of(ours))]
    key_lengths = {*first.contents.layout.key_lengths, *second.contents.layout.key_lengths}
    merged = _added(np.concatenate([ours, theirs]))
    placed = _placed(merged, tuple(sorted(key_lengths)), first.contents, bits, max_bytes)
    confidence = first.confidence if prefer_first else _mixed_confidence(first, second)
    corpora = [table.header["corpus"] for table in (first, second)]
    corpus = {name: sum(each[name] for each in corpora) for name in corpora[0]}
    _write(path, placed, first, corpus, confidence, provenance)


def prune(
    table: Table,
    path: Path,
    provenance: Mapping[str, Any],
    max_bytes: int | None = None,
    min_count: int = 1,
) -> None:
    """Write a table without the contexts seen less often than `min_count` or worth least.

    Raises:
        TableError: the file cannot be written.
    """
    placed = pruned(table.contents, max_bytes, min_count)
    _write(path, placed, table, table.header["corpus"], table.confidence, provenance)


def pruned(contents: Contents, max_bytes: int | None = None, min_count: int = 1) -> Placed:
    """What `prune` writes, in memory."""
    bits = contents.layout.hash_bits
    entries = entries_of(contents, bits)
    entries = entries[entries["total"] >= min_count]
    return _placed(entries, contents.layout.key_lengths, contents, bits, max_bytes)


def entries_of(contents: Contents, bits: int) -> np.ndarray:
    """The entries in a table, hashes cut to `bits`: ENTRY [n], sorted."""
    layout = contents.layout
    found = []
    first_bucket = 0
    for region in layout.regions:
        buckets = contents.buckets[first_bucket : first_bucket + region.num_buckets]
        first_bucket += region.num_buckets
        slots = read_slots(buckets, layout.token_bytes)
        bucket, index = np.nonzero(slots[..., 2])
        tags, tokens, counts, totals = slots[bucket, index].T
        hashes = hashes_at(bucket, tags, layout.hash_bits, region.num_buckets)
        hashes = hashes >> np.uint64(layout.hash_bits - bits) << np.uint64(HASH_BITS - bits)
        entries = np.zeros(len(hashes), ENTRY)
        entries["key"] = hashes << np.uint64(8)
        entries["token"] = tokens
        entries["count"], entries["total"] = unpacked(counts), unpacked(totals)
        found.append(entries)
    return _ranked(np.concatenate(found))


def _added(entries: np.ndarray) -> np.ndarray:
    """Entries of several tables as those of one: counts of equal contexts and tokens added."""
    entries = entries[np.lexsort((entries["token"], _contexts_of(entries)))]
    first = _starts(_contexts_of(entries))
    is_best = entries["key"] & np.uint64(RANK_MASK) == 0  # once per table: has the total of each
    totals = _sums(entries["total"] * is_best, first)
    totals = np.repeat(totals, _sizes(first, len(entries)))
    starts = _starts(_contexts_of(entries), entries["token"])
    added = entries[starts].copy()
    added["count"], added["total"] = _sums(entries["count"], starts), totals[starts]
    return _ranked(added)


def _ranked(entries: np.ndarray) -> np.ndarray:
    """Distinct continuations in the order of their counts, with value and heat of their context."""
    order = np.lexsort(
        (entries["token"], -entries["count"].astype(np.int64), _contexts_of(entries))
    )
    entries = entries[order]
    contexts = _contexts_of(entries)
    first = _starts(contexts)
    sizes = _sizes(first, len(entries))
    ranks = np.arange(len(entries)) - np.repeat(first, sizes)
    entries["key"] = contexts << np.uint64(8) | ranks.astype(np.uint64)
    totals = entries["total"].astype(np.float64)
    worth = totals * np.repeat(entries["count"][first], sizes) / (totals + 1)
    entries["value"] = worth.astype(np.float32).view(np.uint32) >> 16
    entries["heat"] = totals.astype(np.float32).view(np.uint32) >> 16
    return sort_entries(entries[ranks < MAX_RANKS])


def _contexts_of(entries: np.ndarray) -> np.ndarray:
    return entries["key"] >> np.uint64(8)


def _starts(*columns: np.ndarray) -> np.ndarray:
    """Where in sorted columns a new value begins."""
    if not len(columns[0]):
        return np.empty(0, np.int64)
    changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.concatenate([[0], np.flatnonzero(changes) + 1])


def _sizes(starts: np.ndarray, count: int) -> np.ndarray:
    return np.diff(np.append(starts, count))


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return (
        np.add.reduceat(values.astype(np.int64), starts) if len(starts) else np.empty(0, np.int64)
    )


def _placed(
    entries: np.ndarray,
    key_lengths: tuple[int, ...],
    contents: Contents,
    bits: int,
    max_bytes: int | None,
) -> Placed:
    store = EntryStore()
    store.add(entries)
    return place(store, key_lengths, contents.layout.token_bytes, max_bytes, bits)


def _mixed_confidence(first: Table, second: Table) -> np.ndarray:
    """By cell, in proportion to what each was built from."""
    tokens = [table.header["corpus"]["tokens"] for table in (first, second)]
    share = tokens[0] / max(1, sum(tokens))
    return share * first.confidence + (1 - share) * second.confidence


def _write(
    path: Path,
    placed: Placed,
    origin: Table,
    corpus: Mapping[str, int],
    confidence: np.ndarray,
    provenance: Mapping[str, Any],
) -> None:
    fields = {
        "tokenizer": origin.header["tokenizer"],
        "num_contexts": placed.num_contexts,
        "num_slots": placed.num_slots,
        "confidence": [round(float(value), 4) for value in confidence],
        "corpus": dict(corpus),
        "provenance": dict(provenance),
    }
    write_table(path, placed.contents, fields)
