"""Attention while training: rows of a text, and short chains that start from anchors in it.

Every drafter here is trained on the same picture. A text is `context` rows; a chain is up to L
rows that continue it from an anchor and see the context up to a limit of their own, and each
other. An EAGLE chain grows by one row per step, a P-EAGLE chain is all masks at once and causal,
a DFlash block sees itself in both directions. Scores of chains and context are one product per
text; no mask of chains times chains is ever built, and chains go through in bounded portions.

Shape legend: T context rows, A chains, L rows of a chain, M keys of a chain's own, N context rows
of one text, H heads, G kv heads, D head dim.
"""

import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SCORE_ELEMENTS = 1 << 24  # of one text's chains that are kept for the way back: 64 MiB in float32
PORTION_ELEMENTS = 1 << 22  # of chains that go through together, and so stay in the cache


@dataclass(slots=True)
class Chains:
    """Which chains belong to which text, and how much of it they see."""

    limits: torch.Tensor  # int64 [A], context rows of its own text that a chain sees
    chain_starts: list[int]  # of each text in A, and A
    text_starts: list[int]  # of each text in T, and T


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, text_starts: list[int]
) -> torch.Tensor:
    """Rows of packed texts, each seeing its own text up to itself: [T, H, D] -> [T, H * D]."""
    outputs = []
    for start, end in itertools.pairwise(text_starts):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(found[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def chain_attention(
    query: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chains: Chains,
    own_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Chains see the context up to their limit, and their own keys.

    Args:
        query: [A, L, H, D].
        own_keys: [A, M, G, D], and values alike.
        keys: [T, G, D] of the context, and values alike.
        own_mask: bool, True where a row sees an own key: [L, M] or [A, L, M]; None: all.

    Returns:
        [A, L, H * D].
    """
    outputs = []
    limits = chains.limits.tolist()
    for text, (first, end) in enumerate(itertools.pairwise(chains.chain_starts)):
        start, stop = chains.text_starts[text : text + 2]
        width = query.shape[1] * query.shape[2] * (stop - start + own_keys.shape[1])
        portion = max(1, PORTION_ELEMENTS // max(1, width))
        again = (end - first) * width > SCORE_ELEMENTS and torch.is_grad_enabled()
        for at in range(first, end, portion):
            rows = slice(at, min(at + portion, end))
            context = slice(start, start + max(limits[rows]))
            mask = own_mask[rows] if own_mask is not None and own_mask.dim() == 3 else own_mask
            parts = (query[rows], own_keys[rows], own_values[rows])
            parts += (keys[context], values[context], chains.limits[rows], mask)
            found = checkpoint(_portion, *parts, use_reentrant=False) if again else _portion(*parts)
            outputs.append(found)
    if not outputs:
        return query.flatten(2)
    return torch.cat(outputs)  # pyright: ignore


def _portion(
    query: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    limits: torch.Tensor,
    own_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Chains of one text; see `chain_attention`."""
    chains, length, heads, dim = query.shape
    groups, context = keys.shape[1], keys.shape[0]
    share = heads // groups
    by_group = (query * dim**-0.5).unflatten(2, (groups, share)).permute(2, 0, 1, 3, 4)
    paired = by_group.flatten(2, 3)  # [G, A, L * S, D]
    far = (paired.flatten(1, 2) @ keys.permute(1, 2, 0)).view(groups, chains, -1, context)
    hidden = torch.arange(context, device=limits.device) >= limits[:, None]  # [A, N]
    far = far.masked_fill_(hidden[None, :, None], -torch.inf)
    near = paired @ own_keys.permute(2, 0, 3, 1)  # [G, A, L * S, M]
    if own_mask is not None:
        visible = own_mask.expand(chains, length, -1).repeat_interleave(share, dim=1)
        near = near.masked_fill_(~visible[None], -torch.inf)
    scores = torch.cat([far, near], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    far, near = weights[..., :context], weights[..., context:]
    found = (far.flatten(1, 2) @ values.transpose(0, 1)).view_as(paired)
    found = found + near @ own_values.permute(2, 0, 1, 3)
    return found.unflatten(2, (length, share)).permute(1, 2, 0, 3, 4).flatten(2)
