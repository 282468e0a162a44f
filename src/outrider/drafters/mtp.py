"""MTP: DeepSeek's multi-token prediction, one module used again and again, or several in a row.

A module joins the norm of a token's embedding with the norm of the state before it, projects both
to one input, and runs one decoder block; norm and head follow (arXiv 2412.19437; names as in the
released models). One module feeds its own state back, as Qwen3-Next and vLLM use it. Of several,
the k-th reads the states of the one before it over the whole text, and says the k-th draft token.

Shape legend: as in base.py.
"""

import dataclasses

import torch
from torch import nn

from outrider.drafters.attention import causal_attention
from outrider.drafters.base import Guesses, Texts, grid
from outrider.drafters.blocks import OF_LAYERS, DecoderLayer, RMSNorm
from outrider.drafters.config import DrafterConfig
from outrider.drafters.recurrent import Recurrent


class MTPModule(nn.Module):
    """Joins a token and a state: x [R, H]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm = RMSNorm(size, config.norm_epsilon)
        self.hnorm = RMSNorm(size, config.norm_epsilon)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, embedding: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state = state.to(embedding.dtype)
        return self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], dim=-1))


class MTP(Recurrent):
    """See the module. `layers[k]` is the block of module k."""

    layer_ids_range = (1, 1)
    shape_keys = OF_LAYERS | {"num_modules"}

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        modules = range(config.num_modules)
        self.joins = nn.ModuleList(MTPModule(config) for _ in modules)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in modules)

    def first_state(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def inputs(
        self, tokens: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        join = self.projection or self.joins[0]
        return join(self.embed(tokens), state), None

    def module(self, index: int) -> "MTP":
        """One module as a drafter of its own, with the same parameters."""
        shape = dataclasses.replace(self.config, num_modules=1, num_layers=1)
        alone = MTP(shape)
        alone.joins, alone.layers = (
            nn.ModuleList([parts[index]]) for parts in (self.joins, self.layers)
        )
        alone.norm, alone.d2t = self.norm, self.d2t
        alone.embedding, alone.head = self.embedding, self.head
        return alone

    def guess(self, texts: Texts, anchors: torch.Tensor, lengths: torch.Tensor) -> Guesses:
        """See `Drafter.guess`."""
        if self.config.num_modules == 1:
            return super().guess(texts, anchors, lengths)

        def attend(
            _: DecoderLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            return causal_attention(query, key, value, texts.starts)

        rotation = self.rotary(texts.positions)
        state, states = texts.features, []
        for depth, (join, layer) in enumerate(zip(self.joins, self.layers, strict=True)):
            x = join(self.embed(texts.token_ids.roll(-1 - depth)), state)
            state = layer(x, rotation, attend)
            states.append(state[anchors - 1])
        chain, depth, _ = grid(lengths)
        return Guesses(anchors[chain], depth, self.parts(torch.stack(states, 1)[chain, depth]))
