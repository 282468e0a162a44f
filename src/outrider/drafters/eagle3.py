"""EAGLE-3: one layer on fused features of several target layers, with its own small vocabulary.

See recurrent.py for the steps. The first layer's attention reads the embedding and the features
side by side, each with a norm of its own; layout and names are those of the released models and of
vLLM. The state that is fed back is the one before the last norm.
"""

import torch
from torch import nn

from outrider.drafters.blocks import OF_LAYERS, DecoderLayer, RMSNorm
from outrider.drafters.config import DrafterConfig
from outrider.drafters.recurrent import Recurrent


class Eagle3(Recurrent):
    """See the module."""

    shape_keys = OF_LAYERS | {"num_layers", "norm_before_fc", "norm_before_residual"}

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.fc_norm = RMSNorm(config.feature_size, config.norm_epsilon)
        layers = range(config.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, i, i == 0) for i in layers)

    def first_state(self, features: torch.Tensor) -> torch.Tensor:
        if self.projection is not None:
            return self.projection(features)
        return self.fc(self.fc_norm(features) if self.config.norm_before_fc else features)

    def inputs(
        self, tokens: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return state, self.embed(tokens)
