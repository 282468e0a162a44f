"""Drafters that go on token by token: their own state stands in for features not there yet.

Row p pairs the target's features of token p with the embedding of token p + 1 and says token
p + 2. From the second draft token on, the state of the row before takes the place of features.
Training unrolls these steps (EAGLE-3's training-time test, arXiv 2503.01840): at step d an anchor
sees the rows of the context and its own rows of earlier steps. Position of row p is p, as in vLLM,
and the tokens of a chain are those of the text.

Shape legend: as in base.py.
"""

import torch
from torch import nn

from outrider.drafters.attention import causal_attention, chain_attention
from outrider.drafters.base import Drafter, Guesses, Texts
from outrider.drafters.blocks import DecoderLayer

Own = tuple[torch.Tensor, torch.Tensor]  # keys and values of the chains, [A, d, G, D] each


class Recurrent(Drafter):
    """Base: a subclass says how features become a state, and a state and a token an input."""

    layers: nn.ModuleList

    def first_state(self, features: torch.Tensor) -> torch.Tensor:
        """What stands for features in the first step: [R, F] -> [R, H]."""
        raise NotImplementedError

    def inputs(
        self, tokens: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input of the layers from tokens [R] and states [R, H]: x, and a side input or None."""
        raise NotImplementedError

    def row_inputs(
        self, tokens: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for rows of the text with features [R, F], each with the token behind it."""
        return self.inputs(tokens, self.first_state(features))

    def guess(self, texts: Texts, anchors: torch.Tensor, lengths: torch.Tensor) -> Guesses:
        """See `Drafter.guess`."""
        states, context = self._context(texts)
        state = states[anchors - 1]
        alive = torch.arange(len(anchors))
        empty = [keys.new_empty(len(alive), 0, *keys.shape[1:]) for keys, _ in context]
        own: list[Own] = [(none, none) for none in empty]
        all_states, all_chains = [state], [alive]
        for depth in range(1, int(lengths.max())):
            kept = lengths[alive] > depth
            alive, state = alive[kept], state[kept]
            own = [(keys[kept], values[kept]) for keys, values in own]
            state = self._step(texts, anchors[alive], depth, state, context, own)
            all_states.append(state)
            all_chains.append(alive)
        counts = torch.tensor([len(chains) for chains in all_chains])
        depths = torch.arange(len(counts)).repeat_interleave(counts)
        return Guesses(anchors[torch.cat(all_chains)], depths, self.parts(torch.cat(all_states)))

    def _context(self, texts: Texts) -> tuple[torch.Tensor, list[Own]]:
        """States [T, H] of the rows with features, and their keys and values in each layer.

        The last row of each text is paired with a token of the next one, and never used.
        """
        context: list[Own] = []

        def attend(
            layer: DecoderLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            context.append((key, value))
            return causal_attention(query, key, value, texts.starts)

        x, side = self.row_inputs(texts.token_ids.roll(-1), texts.features)
        rotation = self.rotary(texts.positions)
        for layer in self.layers:
            x = layer(x, rotation, attend, side)
            side = None
        return x, context

    def _step(
        self,
        texts: Texts,
        anchors: torch.Tensor,
        depth: int,
        state: torch.Tensor,
        context: list[Own],
        own: list[Own],
    ) -> torch.Tensor:
        """One more row for each chain; `own` grows by its keys and values. [A, H]."""
        chains = texts.chains(anchors)

        def attend(
            layer: DecoderLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            keys, values = own[layer.index]
            keys = torch.cat([keys, key[:, None]], dim=1)
            values = torch.cat([values, value[:, None]], dim=1)
            own[layer.index] = keys, values
            far = context[layer.index]
            return chain_attention(query[:, None], keys, values, *far, chains)[:, 0]

        x, side = self.inputs(texts.token_ids[anchors + depth], state)
        rotation = self.rotary(texts.positions[anchors] - 1 + depth)
        for layer in self.layers:
            x = layer(x, rotation, attend, side)
            side = None
        return x
