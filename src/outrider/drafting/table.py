"""Drafts from a table that was built offline from text of the kind the target writes."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.checks import number, shown
from outrider.drafting.confidence import (
    MAX_REQUEST_WEIGHT,
    REQUEST_WEIGHT,
    USUAL_WEIGHT,
    Rates,
)
from outrider.drafting.options import at_least
from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
from outrider.errors import ConfigError, TokenizerMismatch
from outrider.tables.format import Table
from outrider.tables.lookup import MAX_BRANCHES, MAX_WIDTH, TableLookup

if TYPE_CHECKING:
    from outrider.target.base import Target


@dataclass(slots=True)
class _Request:
    """How a request's drafts fared, and what the last one was made of."""

    failures: float = REQUEST_WEIGHT
    expected: float = REQUEST_WEIGHT
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)

    @property
    def factor(self) -> float:
        """How much more often than usual its drafts fail."""
        return self.failures / self.expected


class TableSource(DraftSource):
    """Proposes the continuations that a draft table has for the last tokens.

    Args:
        table: an open table, or the path of one.
        num_speculative_tokens: most tokens of a draft.
        branches: continuations of one context in a draft; more than one make it a tree.
        min_survival: a draft holds no token that is accepted less often than this.
        hot_bytes: memory locked for the entries used most; of a large table the others are read
            from the file.

    Raises:
        TableError: the file is no table, or damaged.
        ConfigError: a value out of range.
    """

    name = "table"
    can_extend = True

    def __init__(
        self,
        table: Table | str | Path,
        num_speculative_tokens: int = 8,
        branches: int = 2,
        min_survival: float = 0.02,
        hot_bytes: int = 64 << 20,
    ) -> None:
        at_least("num_speculative_tokens", num_speculative_tokens, 1)
        at_least("branches", branches, 1)
        at_least("hot_bytes", hot_bytes, 0)
        if num_speculative_tokens > MAX_WIDTH or branches > MAX_BRANCHES:
            raise ConfigError(
                f"a table drafts at most {MAX_WIDTH} tokens with {MAX_BRANCHES} branches, got "
                f"num_speculative_tokens={num_speculative_tokens} and branches={branches}"
            )
        min_survival = number("min_survival", min_survival, 0, 1)
        if not isinstance(table, Table | str | Path):
            raise ConfigError(f"a table must be one or the path of a file, got {shown(table)}")
        self.table = table if isinstance(table, Table) else Table(os.path.expanduser(table))
        self.max_draft_tokens = num_speculative_tokens
        self._rates = Rates(self.table.confidence, USUAL_WEIGHT)
        self._lookup = TableLookup(
            self.table.contents,
            self._rates.table,
            num_speculative_tokens,
            branches,
            min_survival,
            hot_bytes,
        )
        self._requests: dict[str, _Request] = {}

    def bind(self, target: "Target", tokenizer: object | None, max_num_seqs: int) -> None:
        """Refuse a target with another vocabulary.

        Raises:
            TokenizerMismatch: the message has both fingerprints, or both sizes.
        """
        fingerprint = getattr(tokenizer, "fingerprint", None)
        if fingerprint is not None and fingerprint != self.table.fingerprint:
            raise TokenizerMismatch(
                f"the table {self.table} was made for the tokenizer "
                f"{self.table.fingerprint}, the target's is {fingerprint}"
            )
        if self.table.vocab_size > target.vocab_size:
            raise TokenizerMismatch(
                f"the table {self.table} was made for {self.table.vocab_size} token ids, "
                f"the target has {target.vocab_size}"
            )
        self._lookup.make_room(max_num_seqs)

    @property
    def answered(self) -> tuple[int, int, int]:
        """Lookups so far that the hot tier answered, the file, and nobody."""
        hot, cold, nowhere = self._lookup.answered.tolist()
        return hot, cold, nowhere

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft]:
        requests = [self._requests.get(c.request_id) or self._begin(c.request_id) for c in contexts]
        newest = -self._lookup.max_key - 1
        keys = [context.token_ids[:newest:-1].tolist() for context in contexts]
        self._look_up(keys, budgets, requests)
        return [self._read(index, request) for index, request in enumerate(requests)]

    def extend(
        self,
        contexts: Sequence[DraftContext],
        chains: Sequence[Sequence[int]],
        budgets: Sequence[int],
    ) -> list[Draft]:
        """The likeliest path of what the table says there."""
        requests = [self._requests.get(context.request_id) or _Request() for context in contexts]
        newest = -self._lookup.max_key - 1
        keys = [
            [*chain[:newest:-1], *context.token_ids[:newest:-1].tolist()]
            for context, chain in zip(contexts, chains, strict=True)
        ]
        self._look_up(keys, budgets, requests)
        return [self._likeliest(index) for index in range(len(contexts))]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            request = self._requests.get(outcome.request_id)
            if request is not None:
                self._judge(request, outcome)

    def release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _begin(self, request_id: str) -> _Request:
        request = self._requests[request_id] = _Request()
        return request

    def _look_up(
        self, keys: Sequence[list[int]], budgets: Sequence[int], requests: Sequence[_Request]
    ) -> None:
        """Ask the table for what follows these tokens, the newest first."""
        lookup, n = self._lookup, len(keys)
        lookup.make_room(n)
        flat: list[int] = []
        padding = [-1] * lookup.max_key
        for key in keys:
            flat += (key + padding)[: lookup.max_key]
        lookup.contexts.reshape(-1)[: len(flat)] = flat
        lookup.budgets[:n] = budgets
        lookup.factors[:n] = [request.factor for request in requests]
        lookup.draft(n)

    def _likeliest(self, index: int) -> Draft:
        """The path of first children, which are the likeliest ones."""
        tokens, parents, _, confidence = self._answer(index)
        draft, node = Draft(source=self.name), -1
        for i, parent in enumerate(parents):
            if parent == node:
                draft.token_ids.append(tokens[i])
                draft.confidence.append(confidence[i])
                node = i
        return draft

    def _answer(self, index: int) -> tuple[list[Any], ...]:
        """Tokens, parents, cells and confidences that were found for one context."""
        found, width = self._lookup.found, self._lookup.width
        start = index * width
        end = start + int(found.lengths[index])
        return tuple(view[start:end].tolist() for view in self._lookup.views)

    def _read(self, index: int, request: _Request) -> Draft:
        tokens, parents, cells, confidence = self._answer(index)
        request.tokens, request.parents, request.cells = tokens, parents, cells
        is_chain = all(parent == i - 1 for i, parent in enumerate(parents))
        return Draft(tokens, [] if is_chain else parents, None, confidence, self.name)

    def _judge(self, request: _Request, outcome: Outcome) -> None:
        """Count the tokens of a draft that were accepted, and those that lost to another."""
        accepted = outcome.num_accepted_drafts
        children = _children(request, outcome.draft)
        node = -1
        for token in outcome.accepted_ids[: accepted + 1]:
            following = -1
            for index in children.get(node, ()):
                is_right = request.tokens[index] == token
                if request.cells[index] >= 0:  # else its confidence is that of a fallback
                    self._count(request, request.cells[index], is_right)
                if is_right:
                    following = index
            if following < 0:
                return
            node = following

    def _count(self, request: _Request, cell: int, is_right: bool) -> None:
        if request.expected > MAX_REQUEST_WEIGHT:
            request.expected /= 2
            request.failures /= 2
        request.expected += 1 - self._rates.count(cell, is_right)
        request.failures += not is_right


def _children(request: _Request, draft: Draft) -> dict[int, list[int]]:
    """Nodes of the last draft that were submitted, by parent; -1 is the context.

    A submitted draft is a part of the one proposed, with parents counted anew.
    """
    place = {
        (parent, token): index
        for index, (parent, token) in enumerate(zip(request.parents, request.tokens, strict=True))
    }
    children: dict[int, list[int]] = {}
    old = {-1: -1}
    parents = draft.parents or itertools.count(-1)
    for new, (parent, token) in enumerate(zip(parents, draft.token_ids, strict=False)):
        index = place.get((old[parent], token))
        if index is None:
            return {}  # not the last draft
        old[new] = index
        children.setdefault(old[parent], []).append(index)
    return children
