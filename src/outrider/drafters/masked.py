"""Drafters that append masks: one causal forward over the text says the tokens of all depths.

The row of the last token says the first draft token; masks behind it, at the positions that follow,
say the others. In training a chain of masks hangs on every anchor: it sees the rows of the text up
to its anchor, and itself causally. How many masks an anchor gets falls geometrically
(conditional drop of tokens, PARD and P-EAGLE), which is what `lengths` says.

Shape legend: as in base.py; S rows of masks.
"""

import torch
from torch import nn

from outrider.drafters.attention import causal_attention, chain_attention
from outrider.drafters.base import Drafter, Guesses, Texts, grid
from outrider.drafters.blocks import DecoderLayer


class Masked(Drafter):
    """Base: a subclass says what the rows of the text and the masks are made of."""

    needs_mask_token = True
    layers: nn.ModuleList
    shift: int  # the row of the last token is that of the token so many places before it

    def row_inputs(
        self, tokens: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input x [T, H] of the text's rows, and a side input or None.

        Args:
            tokens: int64 [T], `shift` places behind the rows' features [T, F].
        """
        raise NotImplementedError

    def mask_inputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for masks: [count, H]."""
        raise NotImplementedError

    def guess(self, texts: Texts, anchors: torch.Tensor, lengths: torch.Tensor) -> Guesses:
        """See `Drafter.guess`."""
        rows = anchors - self.shift
        masked = (lengths > 1).nonzero().squeeze(1)
        if len(masked):
            chain, depth, places = grid(lengths[masked] - 1)
            chain, depth = masked[chain], depth + 1
        else:
            chain = depth = masked
            places = masked[:, None]
        x = self._states(texts, rows, masked, chain, depth, places)
        total = len(texts.token_ids)
        states = torch.cat([x[rows], x[total:]])
        return Guesses(
            torch.cat([anchors, anchors[chain]]),
            torch.cat([torch.zeros_like(anchors), depth]),
            self.parts(states),
        )

    def _states(
        self,
        texts: Texts,
        rows: torch.Tensor,
        masked: torch.Tensor,
        chain: torch.Tensor,
        depth: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Last states of all rows, the text's first: [T + S, H]."""
        total = len(texts.token_ids)
        positions = torch.cat([texts.positions, texts.positions[rows[chain]] + depth])
        rotation = self.rotary(positions)
        chains = texts.chains(rows[masked])
        chains.limits = chains.limits + 1  # the anchor's own row too
        length = places.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        filled = places >= 0
        safe = places.clamp(min=0)

        def attend(
            layer: DecoderLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            keys, values = key[:total], value[:total]
            found = causal_attention(query[:total], keys, values, texts.starts)
            if not len(masked):
                return found
            own = [x[total:][safe] for x in (query, key, value)]  # [A, L, heads, D]
            far = chain_attention(own[0], own[1], own[2], keys, values, chains, causal)
            return torch.cat([found, far[filled]])

        x, side = self.row_inputs(texts.token_ids.roll(-self.shift), texts.features)
        masks, mask_side = self.mask_inputs(len(chain))
        x = torch.cat([x, masks])
        if side is not None and mask_side is not None:
            side = torch.cat([side, mask_side])
        for layer in self.layers:
            x = layer(x, rotation, attend, side)
            side = None
        return x
