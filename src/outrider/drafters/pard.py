"""PARD: a small language model of its own that says several tokens at once behind masks.

It reads tokens alone, no features, so it drafts for any target of its vocabulary (arXiv
2504.18583). Here it is a copy of some layers of the target, adapted.
"""

import torch
from torch import nn

from outrider.drafters.blocks import OF_LAYERS, DecoderLayer
from outrider.drafters.config import DrafterConfig
from outrider.drafters.masked import Masked


class Pard(Masked):
    """See the module."""

    layer_ids_range = (0, 0)
    shape_keys = OF_LAYERS | {"num_layers", "mask_token"}
    shift = 0

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        layers = range(config.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in layers)

    def row_inputs(
        self, tokens: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.embed(tokens), None

    def mask_inputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.config.mask_token_id is not None
        return self.embed(torch.full((count,), self.config.mask_token_id)), None
