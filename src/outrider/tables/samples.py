"""Some of what is in a table, as token ids."""

from collections.abc import Sequence

import numpy as np

from outrider.tables.coverage import MIN_SURVIVAL
from outrider.tables.edit import entries_of
from outrider.tables.format import Table
from outrider.tables.hashing import HASH_BITS, context_hashes
from outrider.tables.lookup import TableLookup


def frequent_starts(table: Table, count: int) -> list[int]:
    """The tokens seen most often as a context of one token, where the table has such contexts."""
    bits = table.contents.layout.hash_bits
    entries = entries_of(table.contents, bits)
    vocabulary = np.arange(table.vocab_size, dtype=np.int32)[:, None]
    hashes = context_hashes(vocabulary)[:, 0] >> np.uint64(HASH_BITS - bits)
    known = entries["key"] >> np.uint64(8 + HASH_BITS - bits)
    if 1 not in table.contents.layout.key_lengths or not len(known):
        return []
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    totals = np.where(known[places] == hashes, entries["total"][places], 0)
    best = np.argsort(-totals.astype(np.int64), kind="stable")[:count]
    return [int(token) for token in best if totals[token]]


def continuation(
    table: Table, token_ids: Sequence[int], count: int
) -> tuple[list[int], list[float]]:
    """What the table would draft after these tokens, and how likely each token is to survive.

    The likeliest chain, as long as the engine would take it.
    """
    lookup = TableLookup(table.contents, table.confidence, width=count, min_survival=MIN_SURVIVAL)
    newest = list(token_ids)[: -lookup.max_key - 1 : -1]
    lookup.contexts[0, : len(newest)] = newest
    lookup.budgets[0] = count
    found = lookup.draft(1)
    length = int(found.lengths[0])
    survival = np.cumprod(found.confidence[0, :length])
    return found.tokens[0, :length].tolist(), survival.tolist()
