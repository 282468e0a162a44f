"""Small drafters with random parameters."""

from typing import Any

import torch

from outrider.drafters import Drafter, DrafterConfig, make_drafter

HIDDEN, DRAFT_VOCAB = 48, 70
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"algorithm": "eagle3", "num_layers": 1},
    "eagle3 normed residual": {"algorithm": "eagle3", "norm_before_residual": True},
    "eagle3 normed features": {"algorithm": "eagle3", "norm_before_fc": True},
    "peagle": {"algorithm": "peagle", "mask_token_id": 3},
    "dflash": {"algorithm": "dflash", "mask_token_id": 3, "qk_norm": True},
    "dspark": {"algorithm": "dspark", "mask_token_id": 3},
    "mtp": {"algorithm": "mtp", "num_layers": 1},
    "pard": {"algorithm": "pard", "mask_token_id": 3, "num_kv_heads": 1, "num_heads": 3},
    "medusa": {"algorithm": "medusa"},
}


def toy_drafter(kind: str, **overrides: Any) -> Drafter:
    """A drafter with random parameters, norms included, attached to random weights."""
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "draft_vocab_size": DRAFT_VOCAB,
        "num_draft_tokens": 7,
        "target_hidden_size": HIDDEN,
        "target_num_layers": 4,
        "target_layer_ids": (0, 2),
        "max_position": 1200,
    }
    torch.manual_seed(0)
    drafter = make_drafter(DrafterConfig(**(settings | KINDS[kind] | overrides)))
    with torch.no_grad():
        for parameter in drafter.parameters():
            size = 1.0 if parameter.dim() == 1 else 2 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * size)
    drafter.d2t = torch.randperm(96)[:DRAFT_VOCAB].sort().values
    drafter.attach(torch.randn(96, HIDDEN), torch.randn(96, HIDDEN))
    return drafter
