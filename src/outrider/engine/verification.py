"""Applies an accept rule to the logits of one forward.

Shape legend: R rows with logits, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.engine.request import Request
from outrider.engine.scheduler import Work
from outrider.results import Logprob
from outrider.target.sampling import (
    RowGroup,
    TextCounts,
    choose_tokens,
    raw_logprobs,
    target_probs,
)
from outrider.target.verify import Verdict, accept_block, accept_matching, accept_rejection


@dataclass(slots=True)
class NewTokens:
    """What one forward brought to one request."""

    accepted: list[int]  # indices of the accepted draft tokens, by depth
    token_ids: list[int]  # their ids and the bonus token, which may be a draft token itself
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token, when asked for
    error: str | None = None  # why there are none, and will be none


class Verifier(Protocol):
    """One accept rule. `is_biased` tells the planner what it may look at (see Planner)."""

    is_biased: bool

    def verify(self, logits: torch.Tensor, works: Sequence[Work]) -> list[NewTokens]:
        """Judge logits [R, V], whose rows are those of the works in order."""
        ...

    def release(self, request_id: str) -> None:
        """Forget a request."""
        ...


class _RowGroups:
    """Describes the rows of works to the sampling code, keeping counts for penalties."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._counts: dict[str, TextCounts] = {}

    def of(self, works: Sequence[Work]) -> list[RowGroup]:
        groups: list[RowGroup] = []
        first_row = 0
        for work in works:
            request, draft = work.request, work.draft
            groups.append(
                RowGroup(
                    request.params,
                    request.noise_key,
                    request.tokens.view(),
                    request.num_prompt_tokens,
                    first_row,
                    draft.token_ids,
                    draft.parents,
                    self._eos_token_ids,
                    request.grammar,
                    self._counts_of(request) if request.params.has_penalties else None,
                )
            )
            first_row += 1 + len(draft)
        return groups

    def release(self, request_id: str) -> None:
        self._counts.pop(request_id, None)

    def _counts_of(self, request: Request) -> TextCounts:
        counts = self._counts.get(request.request_id)
        if counts is None:
            counts = TextCounts(request.params, request.num_prompt_tokens)
            self._counts[request.request_id] = counts
        return counts


class MatchingVerifier:
    """The default: drafts are kept where they say what the target chose with its own noise."""

    is_biased = False

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self._groups = _RowGroups(eos_token_ids)

    def verify(self, logits: torch.Tensor, works: Sequence[Work]) -> list[NewTokens]:
        groups = self._groups.of(works)
        chosen = choose_tokens(logits, groups).tolist()
        found = []
        for group in groups:
            first = group.first_row
            if not group.draft_ids:
                verdict = Verdict([], chosen[first])
            else:
                rows = chosen[first : first + group.num_rows]
                verdict = accept_matching(group.draft_ids, group.parents, rows)
            found.append(_new_tokens(logits, group, verdict))
        return found

    def release(self, request_id: str) -> None:
        self._groups.release(request_id)


class SamplingVerifier:
    """The classical rules: tokens drawn from draft probabilities are kept by comparing those.

    `is_block` judges a chain as a whole (block verification); trees are always judged token by
    token.
    """

    is_biased = True

    def __init__(self, eos_token_ids: Sequence[int] = (), is_block: bool = False) -> None:
        self._groups = _RowGroups(eos_token_ids)
        self._is_block = is_block

    def verify(self, logits: torch.Tensor, works: Sequence[Work]) -> list[NewTokens]:
        groups = self._groups.of(works)
        return [
            _new_tokens(logits, group, self._verdict(logits, group, work.draft.probs))
            for group, work in zip(groups, works, strict=True)
        ]

    def _verdict(
        self, logits: torch.Tensor, group: RowGroup, draft_probs: torch.Tensor | None
    ) -> Verdict:
        probs = target_probs(logits, group)
        position = len(group.token_ids)
        if self._is_block and not group.parents:
            return accept_block(group.draft_ids, probs, draft_probs, group.noise_key, position)
        return accept_rejection(
            group.draft_ids, group.parents, probs, draft_probs, group.noise_key, position
        )

    def release(self, request_id: str) -> None:
        self._groups.release(request_id)


def make_verifier(rule: str, eos_token_ids: Sequence[int]) -> Verifier:
    """The verifier of a rule: "invariant", "rejection" (or "standard") or "block"."""
    if rule == "invariant":
        return MatchingVerifier(eos_token_ids)
    assert rule in ("rejection", "standard", "block"), rule
    return SamplingVerifier(eos_token_ids, is_block=rule == "block")


def _new_tokens(logits: torch.Tensor, group: RowGroup, verdict: Verdict) -> NewTokens:
    accepted = verdict.accepted
    token_ids = [group.draft_ids[i] for i in accepted]
    token_ids.append(verdict.bonus_token)
    lost = None if group.grammar is None else group.grammar.lost
    if lost is not None:  # only what rows before it chose counts
        token_ids = token_ids[: sum(row < lost.row for row in (0, *(1 + i for i in accepted)))]
        accepted = accepted[: max(0, len(token_ids) - 1)]
    found = NewTokens(accepted, token_ids)
    if lost is not None and not token_ids:
        found.error = f"structured_outputs cannot be followed any further: {lost.why:.300}"
    if group.params.logprobs is not None and token_ids:
        rows = [group.first_row, *(group.first_row + 1 + i for i in accepted)]
        found.logprobs = raw_logprobs(logits[rows], token_ids, group.params.logprobs)
    return found
