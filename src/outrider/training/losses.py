"""How far a drafter's guesses are from the target, and the slope of it.

One pass of the compiled kernels where they are there and the logits lie on the CPU, else torch.

Shape legend: R guesses, P places of the text they guess at, U vocabulary of the drafter.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from outrider.native import library, pointer


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

    def shares(self, depths: torch.Tensor) -> torch.Tensor:
        """Weight of each guess, float32 [R]."""
        return torch.exp(-depths / self.decay) if self.decay else torch.ones_like(depths).float()


@dataclass(slots=True)
class Wanted:
    """What the target says where guesses are made."""

    logits: torch.Tensor  # [P, U], the target's, of the drafter's vocabulary
    log_sums: torch.Tensor  # float32 [P], over the target's whole vocabulary
    places: torch.Tensor  # int64 [R], row of `logits` for each guess
    labels: torch.Tensor  # int64 [R], the text's token in the drafter's vocabulary; -1: not in it
    best: torch.Tensor  # int64 [R], the target's most likely token likewise


@dataclass(slots=True)
class Losses:
    """Of each guess: the terms, what they say of acceptance, and where to go from here."""

    terms: dict[str, torch.Tensor]  # float32 [R] each, before any weight
    agrees: torch.Tensor  # bool [R], the drafter's best token is the target's
    right: torch.Tensor  # bool [R], it is the text's
    slopes: torch.Tensor  # [R, U], of the weighted sum of all terms, by the logits

    @property
    def acceptance(self) -> torch.Tensor:
        """Chance that a draft which is sampled is accepted, float32 [R]."""
        return 1 - self.terms["tv"]


def losses(
    logits: torch.Tensor, wanted: Wanted, weights: LossWeights, shares: torch.Tensor
) -> Losses:
    """Terms and slopes of guesses with logits [R, U] and weights `shares` [R]."""
    kernel = library() if logits.device.type == "cpu" and logits.shape[1] % 16 == 0 else None
    same = wanted.logits.dtype == logits.dtype
    if kernel is None or not same or logits.dtype not in (torch.bfloat16, torch.float32):
        return _in_torch(logits, wanted, weights, shares)
    return _compiled(kernel, logits.contiguous(), wanted, weights, shares)


class _Job(ctypes.Structure):  # LossJob of native/draft_loss.cpp
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("logits", "target_logits", "log_sums", "places", "labels", "shares"),
                *("slopes", "terms"),
            )
        ),
        *((name, ctypes.c_float) for name in ("ce", "kl", "tv")),
        *((name, ctypes.c_long) for name in ("rows", "columns")),
    )


def _compiled(
    kernel: ctypes.CDLL,
    logits: torch.Tensor,
    wanted: Wanted,
    weights: LossWeights,
    shares: torch.Tensor,
) -> Losses:
    slopes = torch.empty_like(logits)
    terms = torch.empty(len(logits), 4)
    tensors = {
        "logits": logits,
        "target_logits": wanted.logits.contiguous(),
        "log_sums": wanted.log_sums.float().contiguous(),
        "places": wanted.places.contiguous(),
        "labels": wanted.labels.contiguous(),
        "shares": shares.float().contiguous(),
        "slopes": slopes,
        "terms": terms,
    }
    job = _Job(
        ce=weights.ce,
        kl=weights.kl,
        tv=weights.tv,
        rows=len(logits),
        columns=logits.shape[1],
        **{name: pointer(tensor) for name, tensor in tensors.items()},
    )
    kernel.outrider_draft_loss(int(logits.dtype == torch.bfloat16), ctypes.byref(job))
    ce, kl, tv, best = terms.unbind(1)
    chosen = best.long()
    named = {"ce": ce, "kl": kl, "tv": tv}
    return Losses(named, chosen == wanted.best, chosen == wanted.labels, slopes)


def _in_torch(
    logits: torch.Tensor, wanted: Wanted, weights: LossWeights, shares: torch.Tensor
) -> Losses:
    leaf = logits.detach().float().requires_grad_()
    probs = (wanted.logits.float() - wanted.log_sums[:, None]).exp()[wanted.places]  # [R, U]
    with torch.enable_grad():
        log_probs = F.log_softmax(leaf, dim=-1)
        picked = log_probs.gather(1, wanted.labels.clamp(min=0)[:, None]).squeeze(1)
        rest = (1 - probs.sum(-1)).clamp(min=0)
        terms = {
            "ce": torch.where(wanted.labels >= 0, -picked, 0.0),
            "kl": -(probs * log_probs).sum(-1),
            "tv": ((log_probs.exp() - probs).abs().sum(-1) + rest) / 2,
        }
        total = sum((getattr(weights, name) * term for name, term in terms.items()), start=0 * rest)
        (slopes,) = torch.autograd.grad((shares * total).sum(), leaf)
    chosen = logits.argmax(-1)
    named = {name: term.detach() for name, term in terms.items()}
    return Losses(named, chosen == wanted.best, chosen == wanted.labels, slopes.to(logits.dtype))
