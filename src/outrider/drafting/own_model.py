"""What sources share that run a model of their own: room for its KV, and its forwards.

Shape legend: B texts of a forward, T its rows, R rows whose logits are wanted.
"""

from collections.abc import Sequence

import numpy as np

from outrider.target.base import PAGE_SIZE, ForwardBatch
from outrider.target.kv import pages_for

KV_BYTES = 1 << 30  # default size of the KV, unless all requests fit in less
COUNTED = np.arange(1024, dtype=np.int32)


def num_kv_pages(asked: int | None, max_num_seqs: int, longest: int, token_bytes: int) -> int:
    """Pages of KV: for so many tokens as are asked for, or for all requests, up to 1 GiB.

    Args:
        longest: tokens of a text.
        token_bytes: of KV; 0 for a model that keeps none.
    """
    if asked is not None:
        return pages_for(asked)
    wanted = max_num_seqs * pages_for(longest)
    affordable = KV_BYTES // (token_bytes * PAGE_SIZE) if token_bytes else wanted
    return max(1, min(wanted, affordable))


def ragged(
    page_tables: Sequence[np.ndarray],
    starts: Sequence[int],
    counts: Sequence[int],
    wanted: np.ndarray,
    two_way: bool = False,
    token_ids: np.ndarray | None = None,
) -> ForwardBatch:
    """Rows `starts[i]` to `starts[i] + counts[i]` of each text, in one forward.

    Args:
        page_tables: int32, of the KV of each.
        wanted: int32 [R], rows of the forward whose logits are wanted.
        token_ids: int32 [T], where the rows are made of their embeddings.
    """
    if len(counts) == 1:  # the common case, at a third of the time
        rows = COUNTED[: counts[0]] if counts[0] <= len(COUNTED) else np.arange(counts[0])
        rows, row_starts = rows.astype(np.int32, copy=False), np.array([0, counts[0]], np.int32)
        positions = rows + np.int32(starts[0])
    else:
        rows = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])  # [T]
        row_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)  # [B + 1]
        positions = rows + np.repeat(np.array(starts, np.int32), counts)
    return ForwardBatch(
        token_ids=np.zeros(len(rows), np.int32) if token_ids is None else token_ids,
        positions=positions,
        row_starts=row_starts,
        context_lens=np.array(starts, np.int32),
        page_tables=list(page_tables),
        parents=rows - np.int32(1),
        logits_rows=wanted,
        is_tree=np.zeros(len(counts), np.bool_),
        two_way=two_way,
    )


def rows_of(firsts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """The `counts[i]` rows from `firsts[i]` on, int32 [R]."""
    if len(firsts) == 1:
        return np.arange(firsts[0], firsts[0] + counts[0], dtype=np.int32)
    return np.concatenate(
        [np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    ).astype(np.int32)
