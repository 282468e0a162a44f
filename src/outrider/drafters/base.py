"""What all drafters share: the target's embedding and head, and how they are trained.

Shape legend: T tokens of packed texts, A anchors, L depths, R guesses, H hidden, F feature width,
V vocabulary of the target, U vocabulary of the drafter.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from outrider.drafters.attention import Chains
from outrider.drafters.blocks import RMSNorm, Rotary
from outrider.drafters.config import DrafterConfig


@dataclass(slots=True)
class Texts:
    """Packed texts and what the target computed on them."""

    token_ids: torch.Tensor  # int64 [T]
    starts: list[int]  # of each text, and T
    features: torch.Tensor  # [T, F]

    @property
    def positions(self) -> torch.Tensor:
        """Place of every token in its own text, int64 [T]."""
        lengths = torch.tensor(self.starts).diff()
        first = torch.tensor(self.starts[:-1]).repeat_interleave(lengths)
        return torch.arange(self.starts[-1]) - first

    def text_of(self, places: torch.Tensor) -> torch.Tensor:
        """Which text each token [A] lies in, int64 [A]."""
        starts = torch.tensor(self.starts, device=places.device)
        return torch.searchsorted(starts, places, right=True) - 1

    def chains(self, anchors: torch.Tensor) -> Chains:
        """Chains from ascending anchors [A] that see what lies before them."""
        starts = torch.tensor(self.starts)
        bounds = torch.searchsorted(anchors, starts)
        return Chains(anchors - starts[self.text_of(anchors)], bounds.tolist(), self.starts)


Part = tuple[torch.Tensor, torch.Tensor]  # states [R, S] and a matrix [U, S]


@dataclass(slots=True)
class Guesses:
    """Distributions over the next tokens of anchors; row (a, d) guesses token a + 1 + d."""

    anchors: torch.Tensor  # int64 [R]
    depths: torch.Tensor  # int64 [R]
    parts: "list[Part]"  # whose products add up to the logits
    confidence: torch.Tensor | None = None  # [R], logit of being accepted

    @property
    def logits(self) -> torch.Tensor:
        """[R, U]"""
        products = [F.linear(states, weight) for states, weight in self.parts]
        return products[0] if len(products) == 1 else torch.stack(products).sum(0)

    @property
    def places(self) -> torch.Tensor:
        """Index of the guessed token, int64 [R]."""
        return self.anchors + 1 + self.depths


class Drafter(nn.Module):
    """Base of all drafters: layers of its own between the target's embedding and head.

    The embedding and the head are the target's, frozen and never stored; `attach` sets them. A
    drafter that came with others keeps its own.
    """

    needs_mask_token = False
    # Fields of a recipe's DrafterShape that decide something, besides those that all of them have.
    shape_keys: frozenset[str] = frozenset()
    layer_ids_range = (1, 64)  # how many layers of the target it can read

    embedding: torch.Tensor  # [V, H]
    head: torch.Tensor  # [U, H], the target's rows of the tokens it can name
    own_embedding: torch.Tensor | None  # [V, H], stored, where it is not the target's
    own_head: torch.Tensor | None  # [U, H], likewise
    d2t: torch.Tensor  # int64 [U], the target's id of each of its tokens
    # By depth, what calibrates confidences: sigmoid(logit / temperature + shift).
    temperatures: torch.Tensor  # float32 [K]
    shifts: torch.Tensor  # float32 [K]
    # While drafting, what makes the input of the layers in place of the modules of training.
    projection: Callable[..., torch.Tensor] | None = None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size))
        self.register_buffer("temperatures", torch.ones(config.num_draft_tokens))
        self.register_buffer("shifts", torch.zeros(config.num_draft_tokens))
        self.register_buffer("embedding", torch.empty(0), persistent=False)
        self.register_buffer("head", torch.empty(0), persistent=False)
        self.register_buffer("own_embedding", None)
        self.register_buffer("own_head", None)

    def attach(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Take the target's embedding [V, H] and head [V, H], as far as it has none of its own.

        One of its own that is the same as the target's is dropped.
        """
        self.own_embedding = _different(self.own_embedding, embedding)
        self.embedding = embedding if self.own_embedding is None else self.own_embedding
        self.own_head = _different(self.own_head, head[self.d2t])
        self.head = head[self.d2t] if self.own_head is None else self.own_head

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the drafter's own vocabulary: [..., H] -> [..., U]."""
        return F.linear(self.norm(hidden), self.head)

    def parts(self, hidden: torch.Tensor) -> list[Part]:
        """What `logits` multiplies, for guesses [R, H]."""
        return [(self.norm(hidden), self.head)]

    def guess(self, texts: Texts, anchors: torch.Tensor, lengths: torch.Tensor) -> Guesses:
        """Guess what follows each anchor, as when drafting, with the text as its own drafts.

        Args:
            texts: packed texts with features.
            anchors: int64 [A], ascending; the last token known. At least one token precedes it.
            lengths: int64 [A], tokens to guess at each, from 1 on.
        """
        raise NotImplementedError


def _different(own: torch.Tensor | None, given: torch.Tensor) -> torch.Tensor | None:
    """`own` in the number format of `given`; None where it is the same, rounded as it was."""
    if own is None or own.equal(given.to(own)):
        return None
    return own.to(given)


def grid(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chains of these lengths, row after row.

    Returns:
        chain [R] and depth [R] of each row, and rows [A, L] where -1 is no row.
    """
    chain = torch.arange(len(lengths)).repeat_interleave(lengths)
    ends = lengths.cumsum(0)
    depth = torch.arange(len(chain)) - (ends - lengths)[chain]
    rows = torch.full((len(lengths), int(lengths.max())), -1)
    rows[chain, depth] = torch.arange(len(chain))
    return chain, depth, rows
