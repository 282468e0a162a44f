"""DFlash: a block of masks behind the last token, filled in one forward.

Target features of the whole context, fused to one vector per token, become keys and values in
every layer of the drafter; the block attends to them and, in both directions, to itself. This
follows the paper (arXiv 2602.06036) and its released models: the context passes no query, output
or MLP, positions are those of the text, and slot i says the token at slot i, so the first slot,
which holds the last token, says nothing.

Shape legend: as in base.py; B slots of a block.
"""

import torch
from torch import nn

from outrider.drafters.attention import chain_attention
from outrider.drafters.base import Drafter, Guesses, Texts, grid
from outrider.drafters.blocks import OF_LAYERS, DecoderLayer, RMSNorm
from outrider.drafters.config import DrafterConfig


class DFlash(Drafter):
    """See the module."""

    needs_mask_token = True
    shape_keys = OF_LAYERS | {"num_layers", "mask_token"}
    first_slot = 1  # the slot that says the first draft token

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))

    @property
    def block_size(self) -> int:
        return self.config.num_draft_tokens + self.first_slot

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """What keys and values of the context are made from: [T, F] -> [T, H]."""
        if self.projection is not None:
            return self.projection(features)
        return self.hidden_norm(self.fc(features))

    def block_ids(self, anchor_ids: torch.Tensor) -> torch.Tensor:
        """The last token [A] and masks: [A, B]."""
        assert self.config.mask_token_id is not None
        shape = len(anchor_ids), self.block_size
        ids = anchor_ids.new_full(shape, self.config.mask_token_id)
        ids[:, 0] = anchor_ids
        return ids

    def guess(self, texts: Texts, anchors: torch.Tensor, lengths: torch.Tensor) -> Guesses:
        """See `Drafter.guess`. All blocks are whole, whatever the lengths."""
        states = self.block_states(texts, anchors)  # [A, B, H]
        chain, depth, _ = grid(lengths)
        return Guesses(anchors[chain], depth, self.parts(states[chain, depth + self.first_slot]))

    def block_states(self, texts: Texts, anchors: torch.Tensor) -> torch.Tensor:
        """States of the blocks before the last norm at the anchors [A]: [A, B, H]."""
        size, count = self.block_size, len(anchors)
        context = self.fuse(texts.features)  # [T, H]
        positions = texts.positions
        far = self.rotary(positions)
        near = self.rotary((positions[anchors][:, None] + torch.arange(size)).flatten())
        chains = texts.chains(anchors)

        def attend(
            layer: DecoderLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            keys, values = layer.self_attn.keys_values(context, far)
            query, key, value = (x.unflatten(0, (count, size)) for x in (query, key, value))
            return chain_attention(query, key, value, keys, values, chains).flatten(0, 1)

        x = self.embed(self.block_ids(texts.token_ids[anchors])).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, near, attend)
        return x.unflatten(0, (count, size))
