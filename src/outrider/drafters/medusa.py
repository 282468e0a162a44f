"""Medusa: heads on the target's last state, one per depth, with no view of what the others say.

A head is a residual block, x + SiLU(W x + b) with W zero at first, before the target's own head
(arXiv 2401.10774; the residual form is the implementation's).
"""

import torch
from torch import nn
from torch.nn import functional as F

from outrider.drafters.base import Drafter, Guesses, Texts, grid
from outrider.drafters.config import DrafterConfig


class Medusa(Drafter):
    """See the module."""

    layer_ids_range = (1, 1)
    shape_keys = frozenset({"num_layers"})

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        heads = range(config.num_draft_tokens)
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_layers)) for _ in heads
        )
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)

    def states(self, features: torch.Tensor) -> torch.Tensor:
        """Of all heads: features [R, H] of the token before the last -> [R, L, H]."""
        states = []
        for blocks in self.heads:
            x = features
            for block in blocks:  # pyright: ignore[reportGeneralTypeIssues]
                x = x + F.silu(block(x))
            states.append(x)
        return torch.stack(states, dim=1)

    def guess(self, texts: Texts, anchors: torch.Tensor, lengths: torch.Tensor) -> Guesses:
        """See `Drafter.guess`."""
        states = self.states(texts.features[anchors - 1])
        chain, depth, _ = grid(lengths)
        return Guesses(anchors[chain], depth, self.parts(states[chain, depth]))
