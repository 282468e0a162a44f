"""The contract between the engine and anything that proposes tokens.

A draft is data. A source answers `propose` with one draft per context (empty when it has
nothing to say), may learn from `observe`, and forgets a request at `release`. What a source
needs and can do are plain fields on it; nothing outside this package asks for its name to
decide anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from outrider.grammar import GrammarState
    from outrider.sampling_params import SamplingParams
    from outrider.target.base import Target


@dataclass(slots=True)
class Draft:
    """Tokens proposed to follow a context: a chain, or a tree when `parents` is given."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # tree: index of the parent, -1 = context
    probs: torch.Tensor | None = None  # [n, V] each token was drawn from; None = point mass
    confidence: list[float] = field(default_factory=list)  # P(accepted | its parent accepted)
    source: str = ""
    sources: list[str] = field(default_factory=list)  # of every token, where they differ

    def __len__(self) -> int:
        return len(self.token_ids)

    def source_of(self, index: int) -> str:
        """Who proposed one token."""
        return self.sources[index] if self.sources else self.source

    @property
    def is_tree(self) -> bool:
        return bool(self.parents)

    def check(self) -> None:
        """Assert that the parts fit together (parents come before their children)."""
        n = len(self.token_ids)
        assert not self.parents or len(self.parents) == n, (len(self.parents), n)
        assert all(-1 <= p < i for i, p in enumerate(self.parents)), self.parents
        assert not self.confidence or len(self.confidence) == n, (len(self.confidence), n)
        assert self.probs is None or self.probs.shape[0] == n, (self.probs.shape, n)
        assert not self.sources or len(self.sources) == n, (self.sources, n)


@dataclass(slots=True)
class DraftContext:
    """What a source may see of one request. Arrays are views: read them, do not keep them."""

    request_id: str
    token_ids: np.ndarray  # int32 [n], prompt and output so far; every one is final
    num_prompt_tokens: int
    params: "SamplingParams"
    noise_key: int = 0  # uint64 of (seed, choice); a sampling drafter couples its noise to it
    prediction: np.ndarray | None = None  # int32, predicted output that came with the request
    grammar: "GrammarState | None" = None  # that the output follows
    owner: str = ""  # tenant tag; text of one owner is never proposed to another
    features: torch.Tensor | None = None  # [m, len(target_layer_ids) * hidden]: the m newest of
    # the tokens whose KV is committed (all but the last token of token_ids), not yet handed over


@dataclass(slots=True)
class Outcome:
    """What became of one draft, told to its source after verification."""

    request_id: str
    draft: Draft  # what was submitted to the target of this source's own draft
    num_accepted_drafts: int  # depth reached, without the bonus token
    accepted_ids: list[int]  # the accepted tokens and the bonus token


class DraftSource:
    """Base of all sources: override `propose`, and what else applies."""

    name: str = "source"
    target_layer_ids: tuple[int, ...] = ()  # layers whose OUTPUT this source reads; -1 = embedding
    max_draft_tokens: int = 16
    needs_prediction: bool = False  # drafts only for requests that carry a prediction
    needs_grammar: bool = False  # drafts only for requests whose output follows a grammar
    can_extend: bool = False  # has `extend`
    kv_lag: int = 0  # newest tokens of a text that its KV does not hold after `propose`
    cost: float = 0.0  # measured seconds per call, kept by the engine

    def bind(self, target: "Target", tokenizer: object | None, max_num_seqs: int) -> None:
        """Called once by the engine before the first `propose`; refuse a misfit here."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft]:
        """Draft at most ``budgets[i]`` tokens to follow ``contexts[i]``, for every i."""
        raise NotImplementedError

    def extend(
        self,
        contexts: Sequence[DraftContext],
        chains: Sequence[Sequence[int]],
        budgets: Sequence[int],
    ) -> list[Draft]:
        """Draft what follows ``contexts[i]`` and ``chains[i]``, tokens that may never be text.

        Called only where `can_extend`. It leaves no trace in what `propose` and `observe` know,
        and its drafts are told to nobody.
        """
        raise NotImplementedError

    def held_tokens(self, request_id: str) -> int | None:
        """Tokens of a request's text that this source has KV of; None: it keeps none."""
        return None

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from what became of this source's drafts (only submitted ones are told)."""

    def finish(self, context: DraftContext) -> None:
        """A request ended normally with this text and its last features; before `release`.

        There are no features of a request that the source was not allowed to draft for.
        """

    def release(self, request_id: str) -> None:
        """Forget a request: it finished, was aborted, or was preempted. Must be idempotent."""
