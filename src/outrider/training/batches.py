"""From shards to what one step trains on.

All of it follows from (seed, step), so that a resume needs no state.

Shape legend: T tokens of a pack, A anchors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from outrider.drafters.base import Texts
from outrider.errors import DataError
from outrider.training.dataset import Data
from outrider.training.features import Features, FeatureSource, joined


@dataclass(frozen=True, slots=True)
class Place:
    """One text: where it lies."""

    shard: int
    index: int
    start: int
    end: int
    prompt_length: int
    is_greedy: bool
    category: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Pack:
    """Texts of one forward of the drafter, with the anchors that are trained."""

    places: list[Place]
    texts: Texts
    features: Features
    anchors: torch.Tensor  # int64 [A], ascending
    lengths: torch.Tensor  # int64 [A], tokens to guess at each

    def to(self, device: torch.device, dtype: torch.dtype) -> "Pack":
        """The same with its tensors on a device, and features in the type of the products."""
        features = self.features.to(device)
        texts = Texts(self.texts.token_ids.to(device), self.texts.starts, features.layers.to(dtype))
        return Pack(self.places, texts, features, self.anchors.to(device), self.lengths.to(device))

    def partitions(self, count: int) -> Iterator["Pack"]:
        """The same anchors in `count` passes, each with the texts up to its own last guess.

        What a pass holds at once shrinks with its anchors and, where a text is long, with its
        context; gradients add up to those of the whole (sequence partitioning of P-EAGLE).
        """
        if count == 1:
            yield self
            return
        for part in torch.arange(len(self.anchors)).chunk(count):
            anchors, lengths = self.anchors[part], self.lengths[part]
            text = self.texts.text_of(anchors)
            rows, new_starts, moved = [], [0], torch.empty_like(anchors)
            for which in text.unique().tolist():
                mine = text == which
                first = self.texts.starts[which]
                end = int((anchors[mine] + lengths[mine]).max()) + 1
                moved[mine] = anchors[mine] - first + new_starts[-1]
                rows.append(torch.arange(first, end, device=anchors.device))
                new_starts.append(new_starts[-1] + end - first)
            yield self._rows(torch.cat(rows), new_starts, moved, lengths)

    def _rows(
        self, rows: torch.Tensor, starts: list[int], anchors: torch.Tensor, lengths: torch.Tensor
    ) -> "Pack":
        kept = {name: getattr(self.features, name)[rows] for name in Features.__slots__}
        texts = Texts(self.texts.token_ids[rows], starts, self.texts.features[rows])
        return Pack(self.places, texts, Features(**kept), anchors, lengths)


@dataclass(frozen=True, slots=True)
class AnchorRule:
    """Which guesses are trained: how many anchors, and how many tokens at each."""

    num_draft_tokens: int
    anchors_per_pack: int
    keep_ratio: float = 1.0  # share of the anchors of one depth that the next depth keeps …
    keep_min: float = 0.0  # … but never fewer than this share of all

    def lengths(self, count: int, random: np.random.Generator) -> np.ndarray:
        """Depths at each of `count` anchors, int64."""
        lengths = np.ones(count, np.int64)
        order = random.permutation(count)
        for depth in range(1, self.num_draft_tokens):
            share = max(self.keep_ratio**depth, self.keep_min)
            lengths[order[: round(share * count)]] += 1
        return lengths


def places_of(data: Data, max_length: int, num_shards: int | None = None) -> list[Place]:
    """Every text of the first shards with two tokens to guess, cut to `max_length`."""
    places = []
    for number, shard in enumerate(data.shards[:num_shards]):
        bounds = zip(shard.starts[:-1].tolist(), shard.starts[1:].tolist(), strict=True)
        prompts, temperatures = shard.prompt_lengths.tolist(), shard.temperatures.tolist()
        categories = shard.categories.tolist()
        for index, (start, end) in enumerate(bounds):
            end = min(end, start + max_length)
            if end - start - prompts[index] >= 2:
                parts = (prompts[index], temperatures[index] == 0, categories[index])
                places.append(Place(number, index, start, end, *parts))
    return places


def split(places: list[Place], held_out: int, seed: int) -> tuple[list[Place], list[Place]]:
    """Texts to train on, and those held out.

    Raises:
        DataError: none is left to train on.
    """
    if len(places) <= held_out:
        raise DataError(
            f"the data holds {len(places)} texts with two tokens to guess or more, expected more "
            f"than the {held_out} of held_out"
        )
    order = np.random.default_rng(seed).permutation(len(places))
    return [places[i] for i in order[held_out:]], [places[i] for i in order[:held_out]]


class Shares:
    """Which texts an epoch holds when some categories give only a share of theirs.

    The texts of a category take turns: share 0.25 shows each of them in one of four epochs.
    """

    def __init__(self, places: list[Place], shares: Mapping[int, float], seed: int) -> None:
        self._places = places
        self._turn, self._share = np.zeros(len(places)), np.ones(len(places))
        categories = np.array([place.category for place in places])
        for category, share in shares.items():
            (members,) = np.nonzero(categories == category)
            order = np.random.default_rng((seed, category)).permutation(len(members))
            self._turn[members] = order / max(1, len(members))
            self._share[members] = share

    def of(self, epoch: int) -> list[Place]:
        kept = np.flatnonzero((self._turn - epoch * self._share) % 1.0 < self._share)
        # Shares smaller than one text leave some epochs without any: the next one in turn it is.
        chosen = kept if len(kept) else [epoch % len(self._places)]
        return [self._places[i] for i in chosen]


def pack_places(places: list[Place], tokens: int, seed: int, epoch: int) -> list[list[Place]]:
    """Texts in the order of one epoch, in packs of at most `tokens` (a longer text is alone)."""
    order = np.random.default_rng((seed, epoch)).permutation(len(places))
    packs: list[list[Place]] = []
    room = 0
    for i in order:
        place = places[i]
        if not packs or len(place) > room:
            packs.append([])
            room = tokens
        packs[-1].append(place)
        room -= len(place)
    return packs


def load_pack(
    places: list[Place],
    data: Data,
    shards: FeatureSource,
    rule: AnchorRule,
    random: np.random.Generator,
) -> Pack:
    """Read one pack and draw its anchors."""
    ids, parts, starts, eligible = [], [], [0], []
    for place in places:
        at = starts[-1]
        ids.append(data.shards[place.shard].token_ids[place.start : place.end])
        parts.append(shards.read(place.shard, place.start, place.end))
        starts.append(at + len(place))
        # A draft starts behind a token of the answer, and at least one token follows it.
        eligible.append(np.arange(at + max(1, place.prompt_length), starts[-1] - 1))
    features = joined(parts)
    texts = Texts(torch.from_numpy(np.concatenate(ids)).long(), starts, features.layers)
    anchors = np.concatenate(eligible)
    if len(anchors) > rule.anchors_per_pack:
        anchors = np.sort(random.choice(anchors, rule.anchors_per_pack, replace=False))
    ends = np.array(starts)[np.searchsorted(starts, anchors, side="right")]
    lengths = np.minimum(rule.lengths(len(anchors), random), ends - 1 - anchors)
    return Pack(places, texts, features, torch.from_numpy(anchors), torch.from_numpy(lengths))


class Batches:
    """The packs of every step, for one process of `world`."""

    def __init__(
        self,
        data: Data,
        shards: FeatureSource,
        places: Shares,
        rule: AnchorRule,
        tokens_per_pack: int,
        packs_per_step: int,
        seed: int,
    ) -> None:
        self._data, self._shards, self._places, self._rule = data, shards, places, rule
        self._tokens_per_pack, self._packs_per_step, self._seed = (
            tokens_per_pack,
            packs_per_step,
            seed,
        )
        self._epochs: dict[int, list[list[Place]]] = {}
        self.steps_per_epoch = max(1, len(self._epoch(0)) // packs_per_step)

    def _epoch(self, epoch: int) -> list[list[Place]]:
        if epoch not in self._epochs:
            packs = pack_places(self._places.of(epoch), self._tokens_per_pack, self._seed, epoch)
            self._epochs = {epoch: packs}
        return self._epochs[epoch]

    def step(self, step: int, rank: int = 0, world: int = 1) -> Iterator[Pack]:
        """This process's packs of a step; those of all processes are the same for any `world`."""
        epoch, within = divmod(step, self.steps_per_epoch)
        packs = self._epoch(epoch)
        first, count = within * self._packs_per_step, self._packs_per_step
        for number in range(first + rank, first + count, world):
            random = np.random.default_rng((self._seed, epoch, number))
            places = packs[number % len(packs)]
            pack = load_pack(places, self._data, self._shards, self._rule, random)
            for place in packs[(number + count) % len(packs)]:  # of the next step
                self._shards.prepare(place.shard, place.start, place.end)
            yield pack
