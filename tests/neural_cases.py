"""Tiny drafters for FakeTarget, one of every kind."""

import torch

from outrider.drafters import Drafter, DrafterConfig, make_drafter

KINDS = {
    "eagle3": {"algorithm": "eagle3", "num_layers": 1, "target_layer_ids": (-1, 0, 1)},
    "eagle3 of two layers": {"algorithm": "eagle3", "num_layers": 2, "norm_before_residual": True},
    "peagle": {"algorithm": "peagle", "mask_token_id": 0},
    "dflash": {"algorithm": "dflash", "mask_token_id": 0, "qk_norm": True},
    "dspark": {
        "algorithm": "dspark",
        "mask_token_id": 0,
        "markov_rank": 3,
        "confidence_head": True,
    },
    "dspark gated": {
        "algorithm": "dspark",
        "mask_token_id": 0,
        "markov_rank": 3,
        "markov_head": "gated",
    },
    "dspark rnn": {
        "algorithm": "dspark",
        "mask_token_id": 0,
        "markov_rank": 3,
        "markov_head": "rnn",
    },
    "dspark without a head": {"algorithm": "dspark", "mask_token_id": 0},
    "mtp": {"algorithm": "mtp", "num_layers": 1, "target_layer_ids": (1,)},
    "mtp of four modules": {
        "algorithm": "mtp",
        "num_layers": 4,
        "num_modules": 4,
        "target_layer_ids": (1,),
    },
    "medusa": {"algorithm": "medusa", "num_layers": 1, "target_layer_ids": (1,)},
    "pard": {"algorithm": "pard", "mask_token_id": 0, "target_layer_ids": ()},
}


def toy_drafter(
    kind: str, vocab_size: int, draft_vocab_size: int | None = None, num_draft_tokens: int = 4
) -> Drafter:
    """A random drafter whose words differ widely; of a reduced vocabulary, every other token."""
    size = draft_vocab_size or vocab_size
    shape = {"num_layers": 2, "target_layer_ids": (0, 1)} | KINDS[kind]
    config = DrafterConfig(
        hidden_size=4,
        intermediate_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=vocab_size,
        draft_vocab_size=size,
        num_draft_tokens=num_draft_tokens,
        target_hidden_size=4,
        target_num_layers=2,
        max_position=256,
        **shape,  # pyright: ignore[reportArgumentType]
    )
    torch.manual_seed(0)
    drafter = make_drafter(config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    drafter.d2t = torch.arange(size) * (vocab_size // size)
    return drafter
