"""DSpark: DFlash's block, then a light sequential head, and a head for confidence.

The block is filled in one forward, the slot of the last token included: slot k says token k + 1
behind it. A sequential head then adds to the logits of each slot a bias that depends on the token
chosen just before, so that neighbours agree; and a confidence head estimates, per slot, the chance
that the target accepts. Heads and loss follow the reference implementation (DeepSpec), whose
logits are those of the shifted block, and the paper arXiv 2607.05147.

Shape legend: as in base.py; r rank of the head.
"""

import torch
from torch import nn

from outrider.drafters.base import Guesses, Texts, grid
from outrider.drafters.config import DrafterConfig
from outrider.drafters.dflash import DFlash


class MarkovHead(nn.Module):
    """Bias [.., U] on the next token, from the token before it and, by kind, the block's state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_head
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step of all chains: bias [A, U], and the state for the next slot.

        Args and state are those of `word`.
        """
        e, state = self.word(before, hidden, state)
        return self.markov_w2(e), state

    def word(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the second matrix is multiplied with, in one step of all chains.

        Args:
            before: int64 [A], the token before each slot.
            hidden: [A, H], the block's normed states at the slot.
            state: [A, r] of an rnn after the slot before; None at the first.

        Returns:
            [A, r], and the state for the next slot.
        """
        e = self.markov_w1(before)
        if self.kind == "gated":
            e = torch.sigmoid(self.gate_proj(torch.cat([hidden, e], dim=-1))) * e
        elif self.kind == "rnn":
            state = torch.zeros_like(e) if state is None else state
            joint = self.joint_proj(torch.cat([state, e, hidden], dim=-1))
            gate, candidate, out = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            e = torch.tanh(out)
        return e, state


class ConfidenceHead(nn.Module):
    """Logit of the chance that the target accepts a slot's token, given all before it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        seen = config.hidden_size + config.confidence_sees_token * config.markov_rank
        self.proj = nn.Linear(seen, 1)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """hidden [.., H] and the embedding [.., r] of the token before: [..]."""
        seen = hidden if before is None else torch.cat([hidden, before], dim=-1)
        return self.proj(seen).squeeze(-1)


class DSpark(DFlash):
    """See the module."""

    shape_keys = DFlash.shape_keys | {"markov_rank", "markov_head", "confidence_head"}
    first_slot = 0

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None

    def guess(self, texts: Texts, anchors: torch.Tensor, lengths: torch.Tensor) -> Guesses:
        """See `Drafter.guess`; each slot is told the text's own token before it."""
        states = self.norm(self.block_states(texts, anchors))  # [A, B, H], what all heads read
        chain, depth, _ = grid(lengths)
        kept = states[chain, depth]  # [R, H]
        before = texts.token_ids[anchors[chain] + depth]  # [R]
        parts = [(kept, self.head)]
        if self.markov_head is not None:
            words = self._words(self.markov_head, texts, anchors, lengths, states)
            parts.append((words, self.markov_head.markov_w2.weight))
        confidence = None
        if self.confidence_head is not None:
            confidence = self.confidence_head(kept, self.token_state(before))
        return Guesses(anchors[chain], depth, parts, confidence)

    def token_state(self, before: torch.Tensor) -> torch.Tensor | None:
        """What the confidence head sees of the token before: [..] -> [.., r]."""
        if self.markov_head is None or not self.config.confidence_sees_token:
            return None
        return self.markov_head.markov_w1(before)

    def _words(
        self,
        head: MarkovHead,
        texts: Texts,
        anchors: torch.Tensor,
        lengths: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """[R, r], slot by slot only where a state goes along."""
        chain, depth, _ = grid(lengths)
        if head.kind != "rnn":
            before = texts.token_ids[anchors[chain] + depth]
            return head.word(before, states[chain, depth], None)[0]
        last = len(texts.token_ids) - 1
        state, words = None, []
        for slot in range(int(lengths.max())):
            before = texts.token_ids[(anchors + slot).clamp(max=last)]
            word, state = head.word(before, states[:, slot], state)
            words.append(word)
        return torch.stack(words, dim=1)[chain, depth]
