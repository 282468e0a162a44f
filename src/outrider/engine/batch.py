"""Packs the works of a step into one ragged forward.

Shape legend: T rows of the forward, B requests, R rows with logits.
"""

from collections.abc import Sequence

import numpy as np

from outrider.drafting.source import Draft
from outrider.engine.drafts import depths
from outrider.engine.scheduler import Work
from outrider.target.base import ForwardBatch
from outrider.target.kv import KVArena


def pack(works: Sequence[Work], arena: KVArena, layer_ids: tuple[int, ...] = ()) -> ForwardBatch:
    """Text rows of every work, then its draft rows, without padding.

    Logits are asked for the last text row and all draft rows of works with `is_last`.
    """
    num_rows = np.array([work.num_rows + len(work.draft) for work in works], np.int32)
    context_lens = np.array([work.context_len for work in works], np.int32)
    row_starts = np.zeros(len(works) + 1, np.int32)
    np.cumsum(num_rows, out=row_starts[1:])
    local = np.arange(row_starts[-1], dtype=np.int32) - np.repeat(row_starts[:-1], num_rows)
    forward = ForwardBatch(
        token_ids=np.empty(len(local), np.int32),
        positions=local + np.repeat(context_lens, num_rows),
        row_starts=row_starts,
        context_lens=context_lens,
        page_tables=[arena.page_table(work.request.request_id) for work in works],
        parents=local - np.int32(1),
        logits_rows=_rows_with_logits(works, row_starts),
        is_tree=np.array([work.draft.is_tree for work in works], np.bool_),
        layer_ids=layer_ids,
    )
    _fill_tokens(forward, works)
    return forward


def _fill_tokens(forward: ForwardBatch, works: Sequence[Work]) -> None:
    start = 0
    for work in works:
        text = work.request.tokens.view()
        end = start + work.num_rows
        forward.token_ids[start:end] = text[work.context_len : work.context_len + work.num_rows]
        start = end + len(work.draft)
        if work.draft.token_ids:
            forward.token_ids[end:start] = work.draft.token_ids
            if work.draft.is_tree:
                _fill_tree(forward, work.draft, end, work.context_len)


def _fill_tree(forward: ForwardBatch, draft: Draft, start: int, root_position: int) -> None:
    """Parents and positions of a tree whose root, the last token of the text, is row 0."""
    parents = np.array(draft.parents, np.int32)
    forward.parents[start : start + len(parents)] = parents + 1
    forward.positions[start : start + len(parents)] = root_position + np.array(depths(draft))


def _rows_with_logits(works: Sequence[Work], row_starts: np.ndarray) -> np.ndarray:
    rows: list[int] = []
    for work, end in zip(works, row_starts[1:].tolist(), strict=True):
        if work.is_last:
            rows.extend(range(end - len(work.draft) - 1, end))
    return np.array(rows, np.int32)
