"""Packs the works of a step into one ragged forward.

Shape legend: T rows of the forward, B requests, R rows with logits.
"""

from collections.abc import Sequence

import numpy as np

from outrider.engine.drafts import depths
from outrider.engine.scheduler import Work
from outrider.target.base import ForwardBatch
from outrider.target.kv import KVArena


def pack(works: Sequence[Work], arena: KVArena, layer_ids: tuple[int, ...] = ()) -> ForwardBatch:
    """Text rows of every work, then its draft rows, without padding.

    Logits are asked for the last text row and all draft rows of works with `is_last`.
    """
    # Lists, then one array each: a step has few rows, and every numpy call costs a µs.
    token_ids: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    logits_rows: list[int] = []
    row_starts = [0]
    for work in works:
        first, draft = work.context_len, work.draft
        token_ids += work.request.tokens.view()[first : first + work.num_rows].tolist()
        token_ids += draft.token_ids
        if draft.is_tree:  # its root, the last token of the text, is row 0
            assert work.num_rows == 1, work.num_rows
            parents += [-1, *(parent + 1 for parent in draft.parents)]
            positions += [first, *(first + depth for depth in depths(draft))]
        else:
            num_rows = work.num_rows + len(draft)
            parents += range(-1, num_rows - 1)
            positions += range(first, first + num_rows)
        row_starts.append(len(token_ids))
        if work.is_last:
            logits_rows += range(row_starts[-1] - len(draft) - 1, row_starts[-1])
    return ForwardBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        row_starts=np.array(row_starts, np.int32),
        context_lens=np.array([work.context_len for work in works], np.int32),
        page_tables=[arena.page_table(work.request.request_id) for work in works],
        parents=np.array(parents, np.int32),
        logits_rows=np.array(logits_rows, np.int32),
        is_tree=np.array([work.draft.is_tree for work in works], np.bool_),
        layer_ids=layer_ids,
    )
