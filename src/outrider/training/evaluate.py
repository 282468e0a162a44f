"""What a drafter would be accepted, judged on texts that it was not trained on.

Drafts are guessed at places spread over each text, with the text itself as the tokens before them.
Greedy text accepts a draft token that is its own; of sampled text the chance is known exactly, for
the target's distribution is. No engine runs: what it would measure is close to this.

Shape legend: A anchors, K depths, R guesses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from outrider.drafters import Drafter
from outrider.drafters.base import Guesses
from outrider.training.batches import AnchorRule, Pack, Place, load_pack
from outrider.training.dataset import Data
from outrider.training.features import FeatureSource
from outrider.training.losses import LossWeights, losses
from outrider.training.trainer import autocast, token_map, wanted_at

ANCHORS_PER_TEXT = 32  # enough for a length; neighbours tell little that is new
TOKENS_PER_PACK = 4096


@dataclass(slots=True)
class Judged:
    """Every draft, all of K tokens."""

    places: torch.Tensor  # int64 [A], index of its text among those that were given
    hits: torch.Tensor  # float32 [A, K], chance that a token is accepted, given all before it
    confidence: torch.Tensor  # float32 [A, K], logit of what the drafter thinks of that chance
    loss: float  # mean, as in training

    def of(self, texts: Sequence[int]) -> "Judged":
        """The drafts of some of the texts."""
        kept = torch.isin(self.places, torch.tensor(texts, dtype=torch.int64))
        return Judged(self.places[kept], self.hits[kept], self.confidence[kept], self.loss)

    def __add__(self, other: "Judged") -> "Judged":
        return Judged(
            torch.cat([self.places, other.places]),
            torch.cat([self.hits, other.hits]),
            torch.cat([self.confidence, other.confidence]),
            self.loss + other.loss,
        )


@dataclass(slots=True)
class HeldOut:
    """How a drafter does on held-out texts; lengths count the token that the target adds."""

    loss: float
    num_drafts: int
    acceptance_length: float
    by_category: dict[str, float] = field(default_factory=dict)
    conditional: list[float] = field(default_factory=list)  # chance of each depth, given all before

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def judge(
    drafter: Drafter,
    data: Data,
    source: FeatureSource,
    places: Sequence[Place],
    loss: LossWeights,
    precision: str = "bfloat16",
    anchors_per_text: int = ANCHORS_PER_TEXT,
) -> Judged | None:
    """Guess at up to so many places of each text; None: no text is long enough."""
    found: Judged | None = None
    weight, first = 0.0, 0
    was_training = drafter.training
    drafter.eval()
    t2d = token_map(drafter)
    for group in _groups(places):
        pack = _pack(group, data, source, drafter.config.num_draft_tokens, anchors_per_text)
        if len(pack.anchors):
            part, share = _judge_pack(drafter, t2d, pack, loss, precision)
            part.places = part.places + first
            found = part if found is None else found + part
            weight += share
        first += len(group)
    drafter.train(was_training)
    if found is not None:
        found.loss /= weight
    return found


def summarise(judged: Judged, places: Sequence[Place], categories: Sequence[str]) -> HeldOut:
    """Acceptance lengths, altogether and by category, and the chance of each depth."""
    survival = judged.hits.cumprod(dim=1)  # [A, K]
    lengths = 1 + survival.sum(dim=1)
    kinds = torch.tensor([place.category for place in places])[judged.places]
    before = torch.cat([torch.ones(len(survival), 1), survival[:, :-1]], dim=1).sum(0)
    return HeldOut(
        loss=judged.loss,
        num_drafts=len(lengths),
        acceptance_length=float(lengths.mean()),
        by_category={
            name: float(lengths[kinds == kind].mean())
            for kind, name in enumerate(categories)
            if bool((kinds == kind).any())
        },
        conditional=(survival.sum(0) / before.clamp(min=1e-9)).tolist(),
    )


def _groups(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Neighbouring places of at most TOKENS_PER_PACK tokens."""
    group: list[Place] = []
    for place in places:
        if group and sum(map(len, group)) + len(place) > TOKENS_PER_PACK:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _pack(
    places: list[Place], data: Data, source: FeatureSource, depths: int, anchors_per_text: int
) -> Pack:
    """The texts with anchors that have all depths, spread evenly."""
    total = sum(map(len, places))
    pack = load_pack(places, data, source, AnchorRule(depths, total), np.random.default_rng(0))
    whole = (pack.lengths == depths).nonzero().squeeze(1)
    text = pack.texts.text_of(pack.anchors[whole])
    kept = []
    for one in text.unique():
        mine = whole[text == one]
        count = min(len(mine), anchors_per_text)
        kept.append(mine[torch.arange(count) * len(mine) // max(1, count)])
    chosen = torch.cat(kept) if kept else whole
    pack.anchors, pack.lengths = pack.anchors[chosen], pack.lengths[chosen]
    return pack


@torch.no_grad()  # inference_mode would leave no way to the slopes, which `losses` works out too
def _judge_pack(
    drafter: Drafter, t2d: torch.Tensor, pack: Pack, weights: LossWeights, precision: str
) -> tuple[Judged, float]:
    """The drafts of one pack, `loss` a sum still, and the weight of that sum."""
    device = t2d.device
    text = pack.texts.text_of(pack.anchors)  # [A]
    is_greedy = torch.tensor([place.is_greedy for place in pack.places])[text]
    moved = pack.to(device, drafter.head.dtype)
    with device, autocast(device, precision):
        guesses = drafter.guess(moved.texts, moved.anchors, moved.lengths)
    shares = weights.shares(guesses.depths)
    wanted = wanted_at(drafter, t2d, moved, guesses.places)
    found, _ = losses(guesses.logits, wanted, weights, shares)
    sure = confidence_logits(guesses)
    hits = torch.stack([found.right.float(), found.acceptance.clamp(0, 1)])  # greedy, sampled
    rows = torch.searchsorted(moved.anchors, guesses.anchors)
    table = torch.empty(3, *moved.anchors.shape, drafter.config.num_draft_tokens, device=device)
    table[:, rows, guesses.depths] = torch.cat([hits, sure[None]])
    table = table.cpu()
    terms = {name: float((shares * term).sum()) for name, term in found.terms.items()}
    loss = sum(getattr(weights, name) * value for name, value in terms.items())
    chosen = torch.where(is_greedy[:, None], table[0], table[1])
    return Judged(text, chosen, table[2], loss), float(shares.sum())


def confidence_logits(guesses: Guesses) -> torch.Tensor:
    """What the drafter says of its own tokens, float32 [R]: its head's logit, or, where it has
    none, that of the chosen token's probability."""
    if guesses.confidence is not None:
        return guesses.confidence.float()
    logits = guesses.logits.float()
    best = logits.max(-1).values
    rest = (logits.logsumexp(-1) - best).clamp(min=1e-6)  # -log p of the best token
    return -torch.expm1(rest).log()  # log(p / (1 - p)) = -log(1/p - 1)
