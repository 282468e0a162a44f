"""How far a drafter's guesses are from the target, and how to say it as one number.

Shape legend: R guesses, U vocabulary of the drafter, K depths.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Shares of the terms; each is averaged over guesses with weight exp(-depth / decay).

    `ce`: cross-entropy against the text's own tokens. `kl`: against the target's distribution.
    `tv`: total variation, half the L1 distance, which is the chance of rejection. `confidence`:
    cross-entropy of the confidence head against 1 - tv. DeepSpec's 0.9 of full L1 is `tv` 1.8.
    """

    ce: float = 0.1
    kl: float = 0.0
    tv: float = 1.8
    confidence: float = 1.0
    decay: float = 4.0  # 0: all depths count alike


@dataclass(slots=True)
class Wanted:
    """What the target says where guesses are made."""

    labels: torch.Tensor  # int64 [R], the text's token in the drafter's vocabulary; -1: not in it
    best: torch.Tensor  # int64 [R], the target's most likely token likewise
    probs: torch.Tensor  # float32 [R, U], the target's; what lies outside U is the rest to 1


@dataclass(slots=True)
class LossSums:
    """Sums over guesses, to be divided by `weight` when all processes have added theirs."""

    loss: torch.Tensor
    weight: torch.Tensor
    terms: dict[str, float]
    accepted: torch.Tensor  # [R], 1 - tv: acceptance of a draft that is sampled
    agrees: torch.Tensor  # bool [R], the most likely tokens are the same


def losses(
    logits: torch.Tensor,
    confidence: torch.Tensor | None,
    depths: torch.Tensor,
    wanted: Wanted,
    weights: LossWeights,
) -> LossSums:
    """Weighted sums of all terms over guesses with logits [R, U]."""
    log_probs = F.log_softmax(logits.float(), dim=-1)
    probs = log_probs.exp()
    rest = (1 - wanted.probs.sum(-1)).clamp(min=0)
    tv = ((probs - wanted.probs).abs().sum(-1) + rest) / 2
    known = wanted.labels >= 0
    picked = log_probs.gather(1, wanted.labels.clamp(min=0)[:, None]).squeeze(1)
    terms = {"ce": torch.where(known, -picked, 0.0), "tv": tv}
    if weights.kl:
        terms["kl"] = -(wanted.probs * log_probs).sum(-1)
    accepted = (1 - tv).detach()
    if confidence is not None:
        terms["confidence"] = F.binary_cross_entropy_with_logits(
            confidence.float(), accepted.clamp(0, 1), reduction="none"
        )
    share = torch.exp(-depths / weights.decay) if weights.decay else torch.ones_like(tv)
    total = sum((getattr(weights, name) * term for name, term in terms.items()), start=tv * 0)
    return LossSums(
        (share * total).sum(),
        share.sum(),
        {name: float((share * term).sum().detach()) for name, term in terms.items()},
        accepted,
        logits.argmax(-1) == wanted.best,
    )
