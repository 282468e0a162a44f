"""How far a drafter's guesses are from the target, and the slope of it.

One pass of the compiled kernels where they are there and the logits lie on the CPU, else torch.

Shape legend: R guesses, P places of the text they guess at, U vocabulary of the drafter.
"""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from outrider.drafters.base import Part
from outrider.native import library, pointer

ROWS = 512  # guesses whose logits are there at once


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
    """Of each guess: the terms, and what they say of acceptance."""

    terms: dict[str, torch.Tensor]  # float32 [R] each, before any weight
    agrees: torch.Tensor  # bool [R], the drafter's best token is the target's
    right: torch.Tensor  # bool [R], it is the text's

    @property
    def acceptance(self) -> torch.Tensor:
        """Chance that a draft which is sampled is accepted, float32 [R]."""
        return 1 - self.terms["tv"]


def losses(
    logits: torch.Tensor, wanted: Wanted, weights: LossWeights, shares: torch.Tensor
) -> tuple[Losses, torch.Tensor]:
    """Terms of guesses with logits [R, U] and weights `shares` [R].

    Returns:
        them, and the slopes of their weighted sum by the logits, [R, U].
    """
    kernel = library() if logits.device.type == "cpu" and logits.shape[1] % 16 == 0 else None
    same = wanted.logits.dtype == logits.dtype
    if kernel is None or not same or logits.dtype not in (torch.bfloat16, torch.float32):
        return _in_torch(logits, wanted, weights, shares)
    return _compiled(kernel, logits.contiguous(), wanted, weights, shares)


@dataclass(slots=True)
class HeadSlopes:
    """Slopes of the weighted sum of all terms by each part of the guesses."""

    states: list[torch.Tensor]  # [R, S] each
    weights: list[torch.Tensor | None]  # [U, S]; None: the matrix is frozen


def head_losses(
    parts: Sequence[Part], wanted: Wanted, weights: LossWeights, shares: torch.Tensor
) -> tuple[Losses, HeadSlopes]:
    """`losses` of the sum of products, and where to go from there, a portion of rows at a time.

    Logits and their slopes never lie in memory as a whole: they would be the largest tensors of a
    step, and reading them back its slowest part.
    """
    dtype = wanted.logits.dtype
    states = torch.cat([s.detach().to(dtype) for s, _ in parts], dim=1)  # [R, all S]
    matrix = torch.cat([w.detach().to(dtype) for _, w in parts], dim=1)  # [U, all S]
    ends = list(itertools.accumulate(s.shape[1] for s, _ in parts))
    columns = [slice(end - s.shape[1], end) for end, (s, _) in zip(ends, parts, strict=True)]
    of_weights = [torch.zeros_like(w) if w.requires_grad else None for _, w in parts]
    of_states, found = torch.empty_like(states), []
    for start in range(0, len(states), ROWS):
        rows = slice(start, start + ROWS)
        some = Wanted(
            *(wanted.logits, wanted.log_sums),
            *(wanted.places[rows], wanted.labels[rows], wanted.best[rows]),
        )
        portion, slopes = losses(states[rows] @ matrix.T, some, weights, shares[rows])
        of_states[rows] = slopes @ matrix
        for total, where in zip(of_weights, columns, strict=True):
            if total is not None:
                total += slopes.T @ states[rows, where]
        found.append(portion)
    by_part = [of_states[:, c].to(s.dtype) for c, (s, _) in zip(columns, parts, strict=True)]
    return _joined(found), HeadSlopes(by_part, of_weights)


def _joined(found: list[Losses]) -> Losses:
    """Of all portions."""
    return Losses(
        {name: torch.cat([each.terms[name] for each in found]) for name in found[0].terms},
        torch.cat([each.agrees for each in found]),
        torch.cat([each.right for each in found]),
    )


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
) -> tuple[Losses, torch.Tensor]:
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
    return Losses(named, chosen == wanted.best, chosen == wanted.labels), slopes


def _in_torch(
    logits: torch.Tensor, wanted: Wanted, weights: LossWeights, shares: torch.Tensor
) -> tuple[Losses, torch.Tensor]:
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
    return Losses(named, chosen == wanted.best, chosen == wanted.labels), slopes.to(logits.dtype)
