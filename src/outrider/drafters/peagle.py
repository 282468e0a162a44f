"""P-EAGLE: EAGLE-3's drafter, made to say all draft tokens in one forward.

The rows of the text are EAGLE-3's. A mask's row has the embedding of the mask token, and in place
of features one learned vector that all depths share (arXiv 2602.01469); it is kept before the
fusion, as the released models keep it. The mask token is one the target never uses.
"""

import torch
from torch import nn

from outrider.drafters.blocks import OF_LAYERS, DecoderLayer, RMSNorm
from outrider.drafters.config import DrafterConfig
from outrider.drafters.masked import Masked


class PEagle(Masked):
    """See the module."""

    shape_keys = OF_LAYERS | {"num_layers", "mask_token", "norm_before_fc", "norm_before_residual"}
    shift = 1

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.fc_norm = RMSNorm(config.feature_size, config.norm_epsilon)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.feature_size))
        layers = range(config.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, i, i == 0) for i in layers)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[R, F] -> [R, H]"""
        if self.projection is not None:
            return self.projection(features)
        return self.fc(self.fc_norm(features) if self.config.norm_before_fc else features)

    def row_inputs(
        self, tokens: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.fuse(features), self.embed(tokens)

    def mask_inputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.config.mask_token_id is not None
        shared = self.fuse(self.mask_hidden[0])  # [1, H]
        masks = torch.full((count,), self.config.mask_token_id)
        return shared.expand(count, -1), self.embed(masks)
