"""Tables made of tables: `merge` adds their counts, `prune` leaves out what is worth least.

A table knows its contexts by their hashes only, and has counts to one part in sixteen; a merged
table is therefore close to the table of both corpora, not the same. Continuations that a build
left out stay out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.checks import INT32_MAX, integer
from outrider.errors import TableError
from outrider.tables.files import check_output
from outrider.tables.format import (
    Contents,
    Layout,
    Table,
    check_provenance,
    file_bytes,
    write_table,
)
from outrider.tables.hashing import HASH_BITS, MAX_RANKS, hashes_at, unpacked
from outrider.tables.header import header_fields
from outrider.tables.lookup import read_slots
from outrider.tables.place import LOAD, ROOMY_LOAD, WAS_HOT, EntryStore, Placed, Sizing, place
from outrider.tables.records import ENTRY, sort_entries

RANK_MASK = 15  # bits of an entry's key


def merge(
    first: Table,
    second: Table,
    path: str | Path,
    provenance: Mapping[str, Any],
    max_bytes: int | None = None,
    prefer_first: bool = False,
) -> Placed:
    """Write a table with the contexts of both.

    Args:
        provenance: of this step; what the inputs were is added to it.
        max_bytes: of more, the contexts of least value are left out.
        prefer_first: a context that both have is taken from the first one alone: for a corpus
            that is closer to what the target writes than another, larger one.

    Raises:
        TableError: they were made for different tokenizers, one is damaged, nothing is left, or
            the file cannot be written.
    """
    _check_edit((first, second), path, provenance, max_bytes)
    bits = min(table.contents.layout.hash_bits for table in (first, second))
    ours, theirs = (entries_of(table.contents, bits) for table in (first, second))
    num_known = sum(table.header["num_contexts"] for table in (first, second))
    num_alike = num_known - num_contexts(ours) - num_contexts(theirs)
    if prefer_first:
        theirs = theirs[~np.isin(_contexts_of(theirs), _contexts_of(ours))]
    key_lengths = {*first.contents.layout.key_lengths, *second.contents.layout.key_lengths}
    merged = _added(np.concatenate([ours, theirs]))
    larger = max((first, second), key=lambda table: table.contents.layout.num_buckets)
    layout = replace(larger.contents.layout, key_lengths=tuple(sorted(key_lengths)), hash_bits=bits)
    corpora = [table.header["corpus"] for table in (first, second)]
    corpus = {name: sum(each[name] for each in corpora) for name in ("texts", "tokens")}
    edit = _Edit(first.header["tokenizer"], corpus, _with_inputs(provenance, first, second))
    edit.num_alike = max(0, num_alike)
    room = LOAD * layout.slots_per_bucket * layout.num_buckets
    fields = edit.fields()
    if len(merged) <= room:  # one small table beside a large one: all stays where it is
        sizing = Sizing(max_bytes, ROOMY_LOAD, layout.regions, fields)
    else:
        sizing = Sizing(max_bytes, ROOMY_LOAD, (), fields)
    placed = _placed(merged, layout, sizing)
    confidence = first.confidence if prefer_first else _mixed_confidence(first, second)
    edit.write(path, placed, confidence, f"max_bytes={max_bytes}")
    return placed


def prune(
    table: Table,
    path: str | Path,
    provenance: Mapping[str, Any],
    max_bytes: int | None = None,
    min_count: int = 1,
) -> Placed:
    """Write a table without the contexts seen less often than `min_count` or worth least.

    Raises:
        TableError: it is damaged, nothing is left, or the file cannot be written.
    """
    _check_edit((table,), path, provenance, max_bytes)
    min_count = integer("min_count", min_count, 1, INT32_MAX, TableError)
    header, layout = table.header, table.contents.layout
    edit = _Edit(header["tokenizer"], header["corpus"], _with_inputs(provenance, table))
    fields = edit.fields()
    entries = entries_of(table.contents, layout.hash_bits)
    kept = entries[entries["total"] >= min_count]
    fits = max_bytes is None or file_bytes(layout, fields) <= max_bytes
    if len(kept) == len(entries) and fits:
        placed = Placed(table.contents, header["num_contexts"], header["num_slots"])
        edit.by_length = header.get("contexts_by_length")
    else:
        placed = _placed(kept, layout, Sizing(max_bytes, ROOMY_LOAD, layout.regions, fields))
        edit.num_rare = num_contexts(entries) - num_contexts(kept)
    edit.write(path, placed, table.confidence, f"min_count={min_count}, max_bytes={max_bytes}")
    return placed


def pruned(contents: Contents, max_bytes: int | None = None, min_count: int = 1) -> Placed:
    """What `prune` writes, in memory."""
    entries = entries_of(contents, contents.layout.hash_bits)
    entries = entries[entries["total"] >= min_count]
    sizing = Sizing(max_bytes, ROOMY_LOAD, contents.layout.regions)
    return _placed(entries, contents.layout, sizing)


def input_of(table: Table) -> dict[str, Any]:
    """A table as a line in the provenance of another one."""
    header, provenance = table.header, table.provenance
    known = {key: provenance[key] for key in ("command", "date") if key in provenance}
    by_length = {"contexts_by_length": header.get("contexts_by_length")}
    return {
        "path": str(table),
        **known,
        "crc32": header["buckets"]["crc32"],
        "num_contexts": header["num_contexts"],
        **(by_length if by_length["contexts_by_length"] else {}),
        "corpus": {name: header["corpus"][name] for name in ("texts", "tokens")},
    }


def _with_inputs(provenance: Mapping[str, Any], *tables: Table) -> dict[str, Any]:
    """The provenance of a step. Copies in it of all that its inputs say would nest without end."""
    copies = [table.provenance for table in tables]
    own = {key: value for key, value in provenance.items() if value not in (copies, *copies)}
    return {**own, "inputs": [input_of(table) for table in tables]}


def _check_edit(
    tables: Sequence[Table],
    path: str | Path,
    provenance: Mapping[str, Any],
    max_bytes: int | None,
) -> None:
    """What can be told before the work: tables of one vocabulary, undamaged, a place to write."""
    check_output(path)
    check_provenance(provenance)
    Sizing(max_bytes)
    first, *others = tables
    for other in others:
        if first.fingerprint != other.fingerprint:
            raise TableError(
                f"{first} was made for the tokenizer {first.fingerprint}, {other} for "
                f"{other.fingerprint}: only tables of one tokenizer can be merged"
            )
        if first.vocab_size != other.vocab_size:
            raise TableError(
                f"{first} was made for {first.vocab_size} token ids, {other} for "
                f"{other.vocab_size}: only tables of one vocabulary can be merged"
            )
    for table in tables:
        table.verify()


@dataclass(slots=True)
class _Edit:
    """What the header of a table made of tables says."""

    tokenizer: Mapping[str, Any]
    corpus: Mapping[str, int]
    provenance: Mapping[str, Any]
    num_rare: int = 0  # contexts below the minimum count
    num_alike: int = 0  # contexts whose hashes cannot be told apart any more
    by_length: Mapping[str, int] | None = None  # known only where none was left out

    def fields(self) -> dict[str, Any]:
        """Of the same length as those to come."""
        return header_fields(self.tokenizer, self.corpus, self.provenance)

    def write(self, path: str | Path, placed: Placed, confidence: np.ndarray, options: str) -> None:
        if not placed.num_contexts:
            raise TableError(f"no context is left with {options}: nothing to write")
        counts = {
            "num_contexts": placed.num_contexts,
            "num_slots": placed.num_slots,
            **({} if self.by_length is None else {"contexts_by_length": self.by_length}),
            "left_out": placed.left_out
            | {"min_count": self.num_rare, "equal_hashes": self.num_alike},
        }
        fields = header_fields(self.tokenizer, self.corpus, self.provenance, counts, confidence)
        write_table(path, placed.contents, fields)


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
        entries["heat"] = 0 if found else WAS_HOT
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
    heat = totals.astype(np.float32).view(np.uint32) >> 16
    was_hot = np.maximum.reduceat(entries["heat"] & WAS_HOT, first) if len(first) else first
    entries["heat"] = heat | np.repeat(was_hot, sizes)
    return sort_entries(entries[ranks < MAX_RANKS])


def num_contexts(entries: np.ndarray) -> int:
    """Of entries that are sorted."""
    return len(_starts(_contexts_of(entries)))


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


def _placed(entries: np.ndarray, layout: Layout, sizing: Sizing) -> Placed:
    store = EntryStore()
    store.add(entries)
    return place(store, layout.key_lengths, layout.token_bytes, sizing, layout.hash_bits)


def _mixed_confidence(first: Table, second: Table) -> np.ndarray:
    """By cell, in proportion to what each was built from."""
    tokens = [table.header["corpus"]["tokens"] for table in (first, second)]
    share = tokens[0] / max(1, sum(tokens))
    return share * first.confidence + (1 - share) * second.confidence
