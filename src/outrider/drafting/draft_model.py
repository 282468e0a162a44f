"""Drafts from a small language model that shares the target's vocabulary.

Shape legend: B requests of a call, T rows of a forward, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.drafting.confidence import Rates
from outrider.drafting.options import at_least
from outrider.drafting.own_model import num_kv_pages, ragged
from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
from outrider.errors import KVFull, TokenizerMismatch
from outrider.target.base import PAGE_SIZE, Target
from outrider.target.kv import KVArena
from outrider.target.sampling import RowGroup, draft_noise_key, draw_drafts, target_probs
from outrider.tokenizer import Tokenizer, first_difference

MAX_ROWS = 1024  # of one forward: longer prompts are taken in in chunks
MAX_MISSING = 8  # tokens of a text without KV with which a chain is still gone on from
# A draft model's probability is not the chance that the target agrees; each tenth of it learns
# its own. To start with it is taken at its word.
TENTHS = (np.arange(10) + 0.5) / 10
TENTHS_WEIGHT = 20.0


@dataclass(slots=True)
class _Request:
    drafted: list[int] = field(default_factory=list)  # the last draft; KV of all but the last
    cells: list[int] = field(default_factory=list)
    stopped: bool = False  # the text has outgrown the model


@dataclass(slots=True)
class _Row:
    """One request in the course of one call."""

    context: DraftContext
    budget: int
    text: np.ndarray  # int32, prompt, output, another source's chain and room for the draft
    num_given: int  # tokens of `text` to draft behind
    noise_key: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.context.request_id

    @property
    def num_tokens(self) -> int:
        return self.num_given + len(self.tokens)


class DraftModelSource(DraftSource):
    """Proposes what another causal language model would say, one forward per draft token.

    The model keeps KV of its own in step with each request: what was accepted of its draft stays,
    what was rejected is overwritten. It samples with the noise of the target's choice, so the two
    agree as often as their distributions overlap.

    Args:
        model: any Target; it is given KV in `bind` and belongs to this source from then on.
        num_speculative_tokens: longest draft.
        tokenizer: the model's; compared with the target's in `bind`.
        kv_cache_tokens: tokens of KV; None takes what all requests can need, up to 1 GiB.
        rule: the accept rule of the engine; all but "invariant" are told `Draft.probs`.

    `events` counts requests that drafting stopped for, by reason: "context" (the text is longer
    than the model's context), "vocabulary" (it holds ids the model does not know), and calls
    without a draft because of "kv".
    """

    name = "draft_model"
    can_extend = True

    def __init__(
        self,
        model: Target,
        num_speculative_tokens: int = 4,
        *,
        tokenizer: object | None = None,
        kv_cache_tokens: int | None = None,
        rule: str = "invariant",
    ) -> None:
        at_least("num_speculative_tokens", num_speculative_tokens, 1)
        if kv_cache_tokens is not None:
            at_least("kv_cache_tokens", kv_cache_tokens, PAGE_SIZE)
        self.model = model
        self.max_draft_tokens = num_speculative_tokens
        self.events: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._kv_cache_tokens = kv_cache_tokens
        self._rule = rule
        self._rates = Rates(TENTHS, TENTHS_WEIGHT)
        self._requests: dict[str, _Request] = {}
        self._arena = KVArena(1)
        self._vocab_size = self._target_vocab_size = model.vocab_size
        self._eos_token_ids: tuple[int, ...] = ()

    def bind(self, target: Target, tokenizer: object | None, max_num_seqs: int) -> None:
        """Check the vocabulary and make room for KV.

        Raises:
            TokenizerMismatch: an id means another token to the model; it names the first one.
        """
        self._check_vocabulary(target, tokenizer)
        self._target_vocab_size = target.vocab_size
        self._vocab_size = min(self.model.vocab_size, target.vocab_size)
        eos = getattr(tokenizer, "eos_token_id", None)
        self._eos_token_ids = () if eos is None else (eos,)
        longest = min(self.model.max_model_len, target.max_model_len) + self.max_draft_tokens
        token_bytes = self.model.kv_bytes_per_token
        num_pages = num_kv_pages(self._kv_cache_tokens, max_num_seqs, longest, token_bytes)
        self._arena = KVArena(num_pages)
        self.model.allocate_kv(num_pages)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft]:
        admitted = [self._admit(c, b) for c, b in zip(contexts, budgets, strict=True)]
        self._say([row for row in admitted if row is not None])
        for row in admitted:
            if row is not None:
                request = self._requests[row.request_id]
                request.drafted, request.cells = row.tokens, _cells(row)
        return [Draft() if row is None else self._draft(row) for row in admitted]

    def extend(
        self,
        contexts: Sequence[DraftContext],
        chains: Sequence[Sequence[int]],
        budgets: Sequence[int],
    ) -> list[Draft]:
        """Rows of the chains run as those of a draft do: they stay if they become text."""
        asked = zip(contexts, chains, budgets, strict=True)
        admitted = [self._admit_chain(*each) for each in asked]
        self._say([row for row in admitted if row is not None])
        for row in admitted:
            if row is not None:
                held = self._arena.num_committed(row.request_id)
                said = row.text[held : row.num_given].tolist()
                self._requests[row.request_id].drafted = [*said, *row.tokens]
        return [Draft() if row is None else self._draft(row) for row in admitted]

    def held_tokens(self, request_id: str) -> int:
        return self._arena.num_committed(request_id)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            request = self._requests.get(outcome.request_id)
            if request is not None:
                self._rates.observe(request.cells, outcome)

    def release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._arena.release(request_id)

    def check_integrity(self) -> None:
        """Assert that KV is held by known requests only, and by one each."""
        self._arena.check_integrity()
        assert set(self._arena.owners) <= set(self._requests), self._arena.owners

    def _say(self, rows: list[_Row]) -> None:
        """Draft for all rows, up to the budget of each."""
        if rows:
            logits = self._take_in(rows)
            self._choose(rows, logits)
            while growing := [row for row in rows if len(row.tokens) < row.budget]:
                self._choose(growing, self._forward(growing, [1] * len(growing), growing))

    def _check_vocabulary(self, target: Target, tokenizer: object | None) -> None:
        ours, theirs = self._tokenizer, tokenizer
        if isinstance(ours, Tokenizer) and isinstance(theirs, Tokenizer):
            difference = first_difference(theirs, ours)
            if difference is not None:
                token_id, expected, got = difference
                raise TokenizerMismatch(
                    f"the draft model {self.model.name} has another tokenizer than "
                    f"{target.name}: token {token_id} is {got!r}, expected {expected!r}"
                )
        elif self.model.vocab_size != target.vocab_size:
            raise TokenizerMismatch(
                f"the draft model {self.model.name} has a vocabulary of "
                f"{self.model.vocab_size} tokens, {target.name} one of {target.vocab_size}"
            )

    def _admit(self, context: DraftContext, budget: int) -> _Row | None:
        """Bring the request's KV in step with its text, and reserve what the call needs."""
        request = self._requests.setdefault(context.request_id, _Request())
        length = len(context.token_ids)
        budget = min(budget, self.max_draft_tokens)
        if request.stopped or budget <= 0:
            return None
        if self._cannot_hold(context, request):
            self._arena.release(context.request_id)
            return None
        budget = min(budget, self.model.max_model_len - length + 1)  # the last needs no KV
        self._commit_accepted(context, request)
        request.drafted, request.cells = [], []
        held = self._arena.num_committed(context.request_id)
        try:
            self._arena.reserve(context.request_id, length - held + budget - 1)
        except KVFull:
            self._arena.release(context.request_id)
            self.events["kv"] += 1
            return None
        text = np.concatenate([context.token_ids, np.zeros(budget, np.int32)])
        key = context.noise_key
        if self._rule == "block":
            key = draft_noise_key(key, length)
        return _Row(context, budget, text, length, key)

    def _admit_chain(self, context: DraftContext, chain: Sequence[int], budget: int) -> _Row | None:
        """A row behind a chain, for a request whose text the model has nearly all KV of."""
        request = self._requests.get(context.request_id)
        length = len(context.token_ids) + len(chain)
        budget = min(budget, self.max_draft_tokens, self.model.max_model_len - length + 1)
        if request is None or request.stopped or budget <= 0:
            return None
        held = self._arena.num_committed(context.request_id)
        missing = len(context.token_ids) - held
        if not 0 <= missing <= MAX_MISSING or max(chain) >= self.model.vocab_size:
            return None
        try:
            self._arena.reserve(context.request_id, length - held + budget - 1)
        except KVFull:
            self.events["kv"] += 1
            return None
        ids = np.array(chain, np.int32)
        text = np.concatenate([context.token_ids, ids, np.zeros(budget, np.int32)])
        return _Row(context, budget, text, length, context.noise_key)

    def _cannot_hold(self, context: DraftContext, request: _Request) -> bool:
        """True, and the request is stopped, when the model cannot take in its text."""
        held = self._arena.num_committed(context.request_id)
        if len(context.token_ids) > self.model.max_model_len:
            reason = "context"
        elif (context.token_ids[held:] >= self.model.vocab_size).any():
            reason = "vocabulary"
        else:
            return False
        self.events[reason] += 1
        request.stopped = True
        return True

    def _commit_accepted(self, context: DraftContext, request: _Request) -> None:
        """Keep the KV of draft tokens that became text; the rest will be overwritten.

        At least one token of the text stays without KV: its row gives the first logits.
        """
        held = self._arena.num_committed(context.request_id)
        if held >= len(context.token_ids):  # the id was given to another request
            self._arena.release(context.request_id)
            return
        said = context.token_ids[held:-1].tolist()
        kept = 0
        for token, drafted in zip(said, request.drafted[:-1], strict=False):
            if token != drafted:
                break
            kept += 1
        if kept:
            self._arena.commit(context.request_id, kept)

    def _take_in(self, rows: list[_Row]) -> torch.Tensor:
        """Run all text without KV; logits [B, V] after the last token of each request."""
        left = [row.num_given - self._arena.num_committed(row.request_id) for row in rows]
        while sum(left) > max(MAX_ROWS, len(rows)):
            i = int(np.argmax(left))
            taken = min(MAX_ROWS, left[i] - 1)
            self._forward([rows[i]], [taken], [])
            self._arena.commit(rows[i].request_id, taken)
            left[i] -= taken
        logits = self._forward(rows, left, rows)
        for row, count in zip(rows, left, strict=True):
            chain = row.num_given - len(row.context.token_ids)
            self._arena.commit(row.request_id, count - chain)
        return logits

    def _forward(
        self, rows: Sequence[_Row], counts: Sequence[int], wanted: Sequence[_Row]
    ) -> torch.Tensor:
        """Run the next tokens of each request; logits of the last one where they are wanted."""
        # KV of draft tokens is there but not committed: it may be overwritten in the next call.
        starts = [
            row.num_tokens - 1 if row.tokens else self._arena.num_committed(row.request_id)
            for row in rows
        ]
        spans = zip(rows, starts, counts, strict=True)
        batch = ragged(
            [self._arena.page_table(row.request_id) for row in rows],
            starts,
            counts,
            (np.cumsum(counts) - 1).astype(np.int32)[: len(wanted)],
            token_ids=np.concatenate([row.text[at : at + count] for row, at, count in spans]),
        )
        return self.model.forward(batch).logits[:, : self._vocab_size]

    def _choose(self, rows: Sequence[_Row], logits: torch.Tensor) -> None:
        """Append the next draft token of each request, from logits [B, V]."""
        groups = [
            RowGroup(
                params=row.context.params,
                noise_key=row.noise_key,
                token_ids=row.text[: row.num_tokens],
                num_prompt_tokens=row.context.num_prompt_tokens,
                first_row=i,
                eos_token_ids=self._eos_token_ids,
            )
            for i, row in enumerate(rows)
        ]
        tokens, probs = draw_drafts(logits, groups)
        for row, group, token, prob in zip(
            rows, groups, tokens.tolist(), probs.tolist(), strict=True
        ):
            if self._rule != "invariant" and not row.context.params.is_greedy:
                row.probs.append(target_probs(logits, group)[0])
            row.text[row.num_tokens] = token
            row.tokens.append(token)
            row.confidence.append(prob)

    def _draft(self, row: _Row) -> Draft:
        return Draft(
            token_ids=list(row.tokens),
            probs=torch.stack(_widened(row.probs, self._target_vocab_size)) if row.probs else None,
            confidence=self._rates.table[_cells(row)].tolist(),
            source=self.name,
        )


def _cells(row: _Row) -> list[int]:
    """Tenths of the probability of each draft token."""
    return [min(9, int(10 * prob)) for prob in row.confidence]


def _widened(rows: Iterable[torch.Tensor], vocab_size: int) -> list[torch.Tensor]:
    """Rows with zeros for the ids the model does not know, [vocab_size] each."""
    return [torch.nn.functional.pad(row, (0, vocab_size - len(row))) for row in rows]
