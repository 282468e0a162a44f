"""From logits to tokens: the one pipeline of every row that is verified or drafted.

Order, as in vLLM: allowed ids, banned ids, bias, min_tokens, penalties, temperature, min_p,
top_k, top_p; logits equal to the one at a top_k or top_p border stay. The token at position i of
a request is then the kept id with the largest logit / temperature + Gumbel noise, noise being a
function of (seed, choice, i, id) alone; greedy is the case without noise; ties go to the lowest
id. So no draft, no batch and no other request has a say in it.

Nothing here writes to the logits it is given: edits go to a copy, made only for the requests
that need one, so raw log probabilities can be read from them at any time.

Shape legend: R rows, n rows of one request, V vocabulary, C columns of the logits (V, or fewer
with a reduced draft vocabulary).
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from outrider.native import library, pointer
from outrider.results import Logprob
from outrider.target import plain_sampling
from outrider.target.edits import TextCounts, check_against_vocab, edit_logits
from outrider.target.noise import draft_noise_key, noise_key
from outrider.target.rows import ROW, UNUSED_ROW, RowGroup

__all__ = [
    "RowGroup",
    "TextCounts",
    "check_against_vocab",
    "choose_tokens",
    "draft_noise_key",
    "draw_drafts",
    "noise_key",
    "raw_logprobs",
    "target_probs",
]


def choose_tokens(logits: torch.Tensor, groups: Sequence[RowGroup]) -> np.ndarray:
    """The target's token of every row, int32 [R], from float32 logits [R, V].

    A row's token has the same bits whatever else is in the call. Rows in no group get -1.
    """
    return _sample(logits, groups, None, False)[0]


def draw_drafts(
    logits: torch.Tensor, groups: Sequence[RowGroup], id_map: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draft tokens int32 [R] and their probabilities float32 [R], from a drafter's logits [R, C].

    Drawn with the noise of the target's choice at the same position, so that the two agree as
    often as the distributions overlap. A serial drafter passes groups of one row whose
    ``token_ids`` end with what it has drafted; a parallel one passes -1 for the draft ids it
    does not know yet. ``id_map`` int32 [C] gives the target's id of each column of a reduced
    draft vocabulary; tokens are the target's ids either way, and groups that need edits take
    logits of all of them. The probability is that of the
    warped distribution; of a greedy request, that at temperature 1.
    """
    return _sample(logits, groups, id_map, True)


def target_probs(logits: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """The distribution `choose_tokens` draws from, float32 [n, V], of one group's rows.

    A greedy request has all its probability at one token.
    """
    kept = logits[group.first_row : group.first_row + group.num_rows]
    if group.needs_edits:
        kept = _edited(kept, group)
    rows = b"".join(group.packed(*_place(kept)))
    lib = _native(kept)
    if lib is None:
        return plain_sampling.probs(kept, np.frombuffer(bytearray(rows), ROW))
    out = torch.empty(group.num_rows, logits.shape[1])
    lib.outrider_target_probs(rows, _long(group.num_rows), _long(logits.shape[1]), pointer(out))
    return out


def raw_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int] | np.ndarray, num_top: int
) -> list[dict[int, Logprob]]:
    """Log probabilities of the raw model for each row of float32 logits [R, V].

    Each dict begins with the row's token (of ``token_ids``), then has the ``num_top`` most likely
    ones in order. Every row is computed by itself: plain and speculative decoding give the same.
    """
    num_rows, vocab_size = logits.shape
    chosen = np.ascontiguousarray(token_ids, np.int32)
    assert len(chosen) == num_rows, (len(chosen), num_rows)
    assert num_rows == 0 or 0 <= chosen.min() <= chosen.max() < vocab_size, chosen
    num_top = min(num_top, vocab_size)
    lib = _native(logits)
    if lib is None:
        ids, values, ranks = plain_sampling.logprobs(logits, chosen, num_top)
    else:
        ids = np.empty((num_rows, 1 + num_top), np.int32)
        values = np.empty((num_rows, 1 + num_top), np.float32)
        ranks = np.empty(num_rows, np.int32)
        lib.outrider_logprobs(
            pointer(logits), _long(logits.stride(0)), _long(num_rows), _long(vocab_size),
            pointer(chosen), _long(num_top), pointer(ids), pointer(values), pointer(ranks),
        )  # fmt: skip
    columns = (ids.tolist(), values.tolist(), ranks.tolist())
    return [_logprob_dict(*row) for row in zip(*columns, strict=True)]


def _logprob_dict(ids: list[int], values: list[float], rank: int) -> dict[int, Logprob]:
    entries = {ids[0]: Logprob(values[0], rank)}
    for place, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
        if token_id >= 0:
            entries.setdefault(token_id, Logprob(value, place))
    return entries


def _sample(
    logits: torch.Tensor,
    groups: Sequence[RowGroup],
    id_map: np.ndarray | None,
    want_probs: bool,
) -> tuple[np.ndarray, np.ndarray]:
    num_rows, num_columns = logits.shape
    packed = [UNUSED_ROW] * num_rows
    edited: list[tuple[slice, torch.Tensor]] = []
    address, stride = _place(logits)
    for group in groups:
        first, count = group.first_row, group.num_rows
        assert first + count <= num_rows, (first, count, num_rows)
        where = slice(first, first + count)
        if group.needs_edits:
            assert id_map is None, "edits speak of the target's ids"
            edited.append((where, _edited(logits[where], group)))
            packed[where] = group.packed(*_place(edited[-1][1]))
        else:
            packed[where] = group.packed(address + first * stride, stride)
    if id_map is not None:
        id_map = np.ascontiguousarray(id_map, np.int32)
        assert len(id_map) == num_columns, (len(id_map), num_columns)
    rows = b"".join(packed)
    lib = _native(logits)
    if lib is None:
        return _sample_plainly(logits, edited, np.frombuffer(bytearray(rows), ROW), id_map)
    tokens = np.empty(num_rows, np.int32)
    probs = np.empty(num_rows if want_probs else 0, np.float32)
    lib.outrider_sample(
        rows, _long(num_rows), _long(num_columns), pointer(id_map),
        pointer(tokens), pointer(probs if want_probs else None),
    )  # fmt: skip
    return tokens, probs


def _sample_plainly(
    logits: torch.Tensor,
    edited: list[tuple[slice, torch.Tensor]],
    rows: np.ndarray,
    id_map: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    if edited:
        logits = logits.clone()
        for where, values in edited:
            logits[where] = values
    tokens, probs = plain_sampling.sample(logits, rows, id_map)
    tokens[rows["position"] < 0] = -1
    return tokens, probs


def _edited(logits: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """A copy of one group's rows with its edits applied, on the same device."""
    values = logits.detach().cpu().numpy().copy()
    edit_logits(values, group)
    return torch.from_numpy(values).to(logits.device)


def _native(logits: torch.Tensor) -> ctypes.CDLL | None:
    """The kernels, where they can read these logits."""
    assert logits.ndim == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    if logits.device.type != "cpu" or logits.stride(1) != 1:
        return None
    return library()


def _place(logits: torch.Tensor) -> tuple[int, int]:
    """Address of the first row, and bytes from one row to the next."""
    return logits.data_ptr(), logits.stride(0) * logits.element_size()


def _long(value: int) -> ctypes.c_long:
    return ctypes.c_long(value)
