"""Edits of the logits before sampling: masks, bias, min_tokens, penalties.

Only requests that ask for an edit pay for one, and all but the mask of allowed ids touch only
the ids concerned. Every row of a request is edited as plain decoding would edit it there: it
sees the prompt, the output and its own ancestors in the draft.

Shape legend: n rows of one request, V vocabulary, U ids that were counted.
"""

from collections.abc import Sequence

import numpy as np

from outrider.checks import shown
from outrider.errors import SamplingError
from outrider.sampling_params import TOKEN_IDS, SamplingParams
from outrider.target.rows import RowGroup


class TextCounts:
    """How often each id occurs in a growing text; the engine keeps one per penalised request.

    Prompt ids count 0 (they are known, which is what the repetition penalty asks), output ids
    1 each. Without a repetition penalty the prompt is left out altogether.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._length = 0 if params.repetition_penalty != 1.0 else num_prompt_tokens
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.empty(64, np.float32)

    @property
    def ids(self) -> np.ndarray:
        """Ids met so far, int64 [U], each once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """Occurrences in the output, float32 [U]."""
        return self._counts[: len(self._place)]

    def of(self, token_id: int) -> float:
        place = self._place.get(token_id)
        return 0.0 if place is None else float(self._counts[place])

    def extend(self, token_ids: np.ndarray) -> None:
        """Count what is new in the text, given the whole of it (prompt and output)."""
        new = token_ids[self._length :]
        split = max(0, self.num_prompt_tokens - self._length)
        for part, weight in ((new[:split], 0.0), (new[split:], 1.0)):
            ids, counts = np.unique(part, return_counts=True)
            for token_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
                self._add(token_id, count * weight)
        self._length = max(self._length, len(token_ids))

    def _add(self, token_id: int, count: float) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, self._ids])
                self._counts = np.concatenate([self._counts, self._counts])
            self._ids[place], self._counts[place] = token_id, 0.0
        self._counts[place] += count


def check_against_vocab(
    params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int] = ()
) -> None:
    """Refuse what can only be judged with the vocabulary at hand; called at submission.

    Raises:
        SamplingError: an id is not in the vocabulary, or no token would be left to choose.
    """
    for name in (*TOKEN_IDS, "logit_bias", "prediction"):
        named = getattr(params, name) or ()
        for token_id in () if isinstance(named, str) else named:
            if not 0 <= token_id < vocab_size:
                raise SamplingError(
                    f"{name} holds token id {shown(token_id)}, "
                    f"expected ids from 0 to {vocab_size - 1}"
                )
    banned = set(params.banned_token_ids or ())
    stops = {i for i in _stop_ids(params, eos_token_ids) if i < vocab_size}
    if not _any_left(params.allowed_token_ids, vocab_size, banned):
        raise SamplingError("banned_token_ids holds every token that may be chosen")
    if params.min_tokens and not _any_left(params.allowed_token_ids, vocab_size, banned | stops):
        raise SamplingError(
            f"min_tokens is {params.min_tokens}, but all the tokens allowed would end the text"
        )


def _any_left(allowed: Sequence[int] | None, vocab_size: int, excluded: set[int]) -> bool:
    if allowed is None:
        return len(excluded) < vocab_size
    return not excluded.issuperset(allowed)


def edit_logits(logits: np.ndarray, group: RowGroup) -> None:
    """Edit the rows of one request in place, float32 [n, V]: as in vLLM, and in its order."""
    params = group.params
    vocab_size = logits.shape[1]
    if params.allowed_token_ids is not None:
        allowed = _columns(params.allowed_token_ids, vocab_size)
        kept = logits[:, allowed]
        logits.fill(-np.inf)
        logits[:, allowed] = kept
    if params.banned_token_ids:
        logits[:, _columns(params.banned_token_ids, vocab_size)] = -np.inf
    if group.grammar is not None:
        output_ids = group.token_ids[group.num_prompt_tokens :]
        group.grammar.mask_rows(logits, output_ids, group.draft_ids, group.parents)
    if params.logit_bias:
        biased = {i: bias for i, bias in params.logit_bias.items() if i < vocab_size}
        logits[:, list(biased)] += np.array(list(biased.values()), np.float32)
    if params.min_tokens > group.num_output_tokens:
        stops = _columns(_stop_ids(params, group.eos_token_ids), vocab_size)
        for row, depth in enumerate(group.depths):
            if group.num_output_tokens + depth < params.min_tokens:
                logits[row, stops] = -np.inf
    if params.has_penalties:
        counts = group.counts or TextCounts(params, group.num_prompt_tokens)
        counts.extend(group.token_ids)
        _penalise_rows(logits, group, counts)


def _stop_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> set[int]:
    return {*eos_token_ids, *(params.stop_token_ids or ())}


def _columns(token_ids: Sequence[int] | set[int], vocab_size: int) -> np.ndarray:
    return np.array([i for i in token_ids if 0 <= i < vocab_size], np.int64)


def _penalise_rows(logits: np.ndarray, group: RowGroup, counts: TextCounts) -> None:
    """Penalise the text's ids on all rows at once, then set right each row's ancestors."""
    rows, ids, totals = _ancestor_counts(group, counts, logits.shape[1])
    before = logits[rows, ids]
    logits[:, counts.ids] = _penalised(logits[:, counts.ids], counts.counts, group.params)
    logits[rows, ids] = _penalised(before, np.array(totals, np.float32), group.params)


def _ancestor_counts(
    group: RowGroup, counts: TextCounts, vocab_size: int
) -> tuple[list[int], list[int], list[float]]:
    """(row, id, occurrences in output and path) for every id on the path to a row."""
    paths: list[dict[int, float]] = [{}]
    for i, token_id in enumerate(group.draft_ids):
        path = dict(paths[(group.parents[i] if group.parents else i - 1) + 1])
        if 0 <= token_id < vocab_size:  # what lies below an impossible token is never used
            path[token_id] = path.get(token_id, counts.of(token_id)) + 1
        paths.append(path)
    entries = [(r, *item) for r, path in enumerate(paths) for item in path.items()]
    return [e[0] for e in entries], [e[1] for e in entries], [e[2] for e in entries]


def _penalised(values: np.ndarray, counts: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Penalised logits float32 [..., U] of ids that occurred `counts` [U] times in the output."""
    if params.repetition_penalty != 1.0:
        factor = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / factor, values * factor)
    values = values - np.float32(params.frequency_penalty) * counts
    return values - np.float32(params.presence_penalty) * (counts > 0)
