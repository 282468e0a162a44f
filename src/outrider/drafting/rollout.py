"""How each kind of drafter gets from features to draft tokens, for many requests at once.

A rollout first takes in the rows of the text that are new to the drafter, then drafts: a block or
a chain of masks in one forward, or one row per token. Rows beyond the text leave no trace: their
KV is overwritten by the next call.

Shape legend: as in chooser.py; H hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.dflash import DFlash
from outrider.drafters.dspark import DSpark
from outrider.drafters.masked import Masked
from outrider.drafters.medusa import Medusa
from outrider.drafters.mtp import MTP
from outrider.drafters.native_draft import Asked, Said, native_blocks, native_chains, native_masks
from outrider.drafters.native_heads import Confidence, MarkovChains, MedusaHeads
from outrider.drafters.recurrent import Recurrent
from outrider.drafters.stack import Stack
from outrider.drafting.chooser import NO_PAGES, Chooser, Seat, logits_of
from outrider.drafting.own_model import ragged, rows_of
from outrider.target.base import ForwardBatch

D = TypeVar("D", bound=Drafter)
Rows = TypeVar("Rows", bound=Masked | Recurrent)
Block = TypeVar("Block", bound=DFlash)


class Rollout(Generic[D]):
    """Base; a subclass drafts for one kind of drafter."""

    reach = 1  # a text of n tokens has n - reach rows that can run …
    lag = 1  # … and n - lag that stay as they are when the text goes on
    needs_rows = True  # nothing can be said without a row of the text that has not run yet

    def __init__(self, drafter: D, stack: Stack, chooser: Chooser) -> None:
        self.drafter, self.stack, self.chooser = drafter, stack, chooser
        self.stacks: Sequence[Stack] = [stack]  # all that have KV
        self._dtype = drafter.norm.weight.dtype

    def num_slots(self, budget: int) -> int:
        """Slots of KV beyond the text that a draft of so many tokens writes to."""
        raise NotImplementedError

    def take_in(self, seat: Seat, count: int) -> None:
        """Run the next `count` rows of the text; more follow in this call."""
        raise NotImplementedError

    def draft(self, seats: Sequence[Seat]) -> None:
        """Run the rows of the text that are left, and draft."""
        raise NotImplementedError

    def _left(self, seat: Seat) -> int:
        return len(seat.context.token_ids) - self.reach - seat.num_held

    def _features(self, seat: Seat, count: int) -> torch.Tensor:
        """Of the next `count` rows; they are taken off."""
        taken, seat.features = seat.features[:count], seat.features[count:]
        return taken

    def _all_features(self, seats: Sequence[Seat]) -> torch.Tensor:
        if len(seats) == 1:
            return seats[0].features
        return torch.cat([seat.features for seat in seats])

    def _take(self, seats: Sequence[Seat], said: Said) -> None:
        """Tokens that a compiled call has chosen."""
        sure = logits_of(said.probs) if said.chances is None else said.chances
        self.chooser.take(seats, [seat.budget for seat in seats], said.tokens, sure)

    def _asked(self, seats: Sequence[Seat], settings: bytes | None) -> Asked:
        return Asked(
            settings=settings,
            held=[seat.num_held for seat in seats],
            texts=[seat.context.token_ids for seat in seats],
            budgets=[seat.budget for seat in seats],
            page_tables=[seat.page_table for seat in seats],
            features=self._all_features(seats),
        )


class BlockRollout(Rollout[Block]):
    """DFlash: features become keys and values, then a block of masks goes through at once.

    A block ends with the last slot that is wanted, though in training it is whole: slots that
    nobody looks at take time, and brought 1 % to drafts of 3 tokens.
    """

    needs_rows = False

    def __init__(self, drafter: Block, stack: Stack, chooser: Chooser) -> None:
        super().__init__(drafter, stack, chooser)
        self._blocks = native_blocks(drafter, stack)

    def num_slots(self, budget: int) -> int:
        return self.drafter.first_slot + budget

    def take_in(self, seat: Seat, count: int) -> None:
        self._store([seat], [count], self._features(seat, count))
        seat.num_held += count

    def _store(self, seats: Sequence[Seat], counts: list[int], features: torch.Tensor) -> None:
        starts = [seat.num_held for seat in seats]
        batch = ragged(_pages(seats), starts, counts, NO_PAGES)
        self.stack.store_context(batch, self.drafter.fuse(features))

    def draft(self, seats: Sequence[Seat]) -> None:
        budgets = [seat.budget for seat in seats]
        if self._blocks is not None:
            settings = self.chooser.settings(seats) if self._blocks.can_choose else None
            said = self._blocks.draft(self._asked(seats, settings))
            if settings is None:
                self._say(seats, budgets, said.states, said.logits)
            else:
                self._take(seats, said)
            return
        self._store(seats, [self._left(seat) for seat in seats], self._all_features(seats))
        sizes = [self.num_slots(budget) for budget in budgets]
        firsts = np.cumsum([0, *sizes[:-1]]).tolist()
        starts = [len(seat.context.token_ids) - 1 for seat in seats]
        wanted = rows_of([first + self.drafter.first_slot for first in firsts], budgets)
        assert self.drafter.config.mask_token_id is not None
        ids = np.full(sum(sizes), self.drafter.config.mask_token_id, np.int32)
        ids[firsts] = [seat.context.token_ids[-1] for seat in seats]
        batch = ragged(_pages(seats), starts, sizes, wanted, two_way=True, token_ids=ids)
        self._say(seats, budgets, *self.stack.run(batch, None))

    def _say(
        self,
        seats: Sequence[Seat],
        budgets: list[int],
        states: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        self.chooser.choose(seats, budgets, logits)


class SequentialBlockRollout(BlockRollout[DSpark]):
    """DSpark: tokens of the block are chosen one after the other by a light head."""

    def __init__(self, drafter: DSpark, stack: Stack, chooser: Chooser) -> None:
        super().__init__(drafter, stack, chooser)
        head = drafter.markov_head
        self._chains: MarkovChains | None = None
        if head is not None and head.kind == "vanilla":
            self._chains = MarkovChains(head, drafter.d2t, self._dtype)
        self._confidence = Confidence(drafter, self._dtype) if drafter.confidence_head else None
        self._blocks = native_blocks(drafter, stack, self._chains, self._confidence)

    def _say(
        self,
        seats: Sequence[Seat],
        budgets: list[int],
        states: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        if self.drafter.markov_head is None:
            super()._say(seats, budgets, states, logits)
        elif self._chains is not None and self.chooser.are_plain(seats):  # without the one call
            anchors = np.array([_last_token(seat) for seat in seats], np.int32)
            tokens, probs = self._chains.greedy(logits, budgets, anchors)
            self.chooser.take(seats, budgets, tokens, logits_of(probs))
        else:
            self._one_by_one(seats, budgets, states, logits)
        if self._confidence is not None:
            text = [int(seat.context.token_ids[-1]) for seat in seats]
            before = [[last, *seat.tokens[:-1]] for last, seat in zip(text, seats, strict=True)]
            chances = self._confidence(states, np.concatenate(before))
            for seat, budget in zip(seats, budgets, strict=True):
                seat.chances, chances = chances[:budget], chances[budget:]

    def _one_by_one(
        self,
        seats: Sequence[Seat],
        budgets: list[int],
        states: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        firsts = np.cumsum([0, *budgets[:-1]])
        states = self.drafter.norm(states.to(self._dtype))
        memory: torch.Tensor | None = None  # of an rnn, one row per seat
        for depth in range(max(budgets)):
            going = [i for i, budget in enumerate(budgets) if budget > depth]
            rows = torch.from_numpy(firsts[going] + depth)
            said = logits[rows]
            before = np.array([_last_token(seats[i]) for i in going], np.int32)
            if self._chains is not None:
                self._chains.add_bias(said, before)
            else:
                if memory is not None and len(memory) > len(going):
                    kept = [i for i, budget in enumerate(budgets) if budget >= depth]
                    memory = memory[[kept.index(i) for i in going]]
                head = self.drafter.markov_head
                assert head is not None
                ids = torch.from_numpy(before.astype(np.int64))
                bias, memory = head(ids, states[rows], memory)
                said += bias
            self.chooser.choose([seats[i] for i in going], [1] * len(going), said)


def _last_token(seat: Seat) -> int:
    return seat.tokens[-1] if seat.tokens else int(seat.context.token_ids[-1])


class _RowRollout(Rollout[Rows]):
    """What masks and recurrence share: the rows of the text go through all layers."""

    def num_slots(self, budget: int) -> int:
        return budget - 1

    def take_in(self, seat: Seat, count: int) -> None:
        x, side = self._text_inputs([seat], [count], self._features(seat, count))
        self.stack.run(ragged(_pages([seat]), [seat.num_held], [count], NO_PAGES), x, side)
        seat.num_held += count

    def _text_inputs(
        self, seats: Sequence[Seat], counts: Sequence[int], features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = np.concatenate(
            [
                seat.token_at(seat.num_held + self.reach, count)
                for seat, count in zip(seats, counts, strict=True)
            ]
        )
        ids = torch.from_numpy(tokens.astype(np.int64))
        return self.drafter.row_inputs(ids, features)


class MaskedRollout(_RowRollout[Masked]):
    """P-EAGLE, PARD: masks behind the text's last row, all in one causal forward."""

    def __init__(self, drafter: Masked, stack: Stack, chooser: Chooser) -> None:
        super().__init__(drafter, stack, chooser)
        self.reach = self.lag = drafter.shift
        self._masks = native_masks(drafter, stack)

    def draft(self, seats: Sequence[Seat]) -> None:
        budgets = [seat.budget for seat in seats]
        if self._masks is not None:
            settings = self.chooser.settings(seats)
            said = self._masks.draft(self._asked(seats, settings))
            if settings is None:
                self.chooser.choose(seats, budgets, said.logits)
            else:
                self._take(seats, said)
            return
        left = [self._left(seat) for seat in seats]
        counts = [new + budget - 1 for new, budget in zip(left, budgets, strict=True)]
        x, side = self._text_inputs(seats, left, self._all_features(seats))
        masks, mask_side = self.drafter.mask_inputs(sum(budgets) - len(seats))
        lasts = np.cumsum(counts) - budgets  # row of each text's last token
        wanted = rows_of(lasts.tolist(), budgets)
        is_mask = np.zeros(sum(counts), np.bool_)
        is_mask[rows_of((lasts + 1).tolist(), [budget - 1 for budget in budgets])] = True
        x = _merged(x, masks, is_mask)
        if side is not None and mask_side is not None:
            side = _merged(side, mask_side, is_mask)
        starts = [seat.num_held for seat in seats]
        _, logits = self.stack.run(ragged(_pages(seats), starts, counts, wanted), x, side)
        self.chooser.choose(seats, budgets, logits)


def _merged(text: torch.Tensor, masks: torch.Tensor, is_mask: np.ndarray) -> torch.Tensor:
    """Rows of both in the order of the forward: [T, H]."""
    rows = text.new_empty(len(is_mask), text.shape[1])
    where = torch.from_numpy(is_mask)
    rows[~where] = text
    rows[where] = masks.to(text.dtype)
    return rows


class RecurrentRollout(_RowRollout[Recurrent]):
    """EAGLE-3, MTP: one row per draft token, each fed with the state before it."""

    def __init__(self, drafter: Recurrent, stack: Stack, chooser: Chooser) -> None:
        super().__init__(drafter, stack, chooser)
        self._chains = native_chains(drafter, stack)

    def draft(self, seats: Sequence[Seat]) -> None:
        settings = None if self._chains is None else self.chooser.settings(seats)
        if self._chains is not None and settings is not None:
            self._take(seats, self._chains.draft(self._asked(seats, settings)))
            return
        left = [self._left(seat) for seat in seats]
        x, side = self._text_inputs(seats, left, self._all_features(seats))
        wanted = (np.cumsum(left) - 1).astype(np.int32)
        starts = [seat.num_held for seat in seats]
        states, logits = self.stack.run(ragged(_pages(seats), starts, left, wanted), x, side)
        self.chooser.choose(seats, [1] * len(seats), logits)
        depth = 1
        while going := [i for i, seat in enumerate(seats) if seat.budget > depth]:
            states, seats = states[going], [seats[i] for i in going]
            tokens = torch.tensor([seat.tokens[-1] for seat in seats])
            x, side = self.drafter.inputs(tokens, states)
            starts = [len(seat.context.token_ids) - 2 + depth for seat in seats]
            rows = np.arange(len(seats), dtype=np.int32)
            batch = ragged(_pages(seats), starts, [1] * len(seats), rows)
            states, logits = self.stack.run(batch, x, side)
            self.chooser.choose(seats, [1] * len(seats), logits)
            depth += 1


class ModulesRollout(Rollout[MTP]):
    """MTP of several modules: the k-th says the k-th token, and has KV of its own over the text.

    Module k reads the token k + 1 places behind its row, so the newest rows run on draft tokens,
    and once more when the text has gone on.
    """

    def __init__(self, drafter: MTP, stacks: Sequence[Stack], chooser: Chooser) -> None:
        super().__init__(drafter, stacks[0], chooser)
        self.stacks = stacks
        self.lag = drafter.config.num_modules

    def num_slots(self, budget: int) -> int:
        return 0

    def take_in(self, seat: Seat, count: int) -> None:
        states = self._features(seat, count).to(self._dtype)
        batch = ragged(_pages([seat]), [seat.num_held], [count], np.arange(count, dtype=np.int32))
        for module in range(self.drafter.config.num_modules):
            states, _ = self._run(module, batch, [seat], [count], states)
        seat.num_held += count

    def draft(self, seats: Sequence[Seat]) -> None:
        left = [self._left(seat) for seat in seats]
        starts = [seat.num_held for seat in seats]
        batch = ragged(_pages(seats), starts, left, np.arange(sum(left), dtype=np.int32))
        lasts = np.cumsum(left) - 1
        states = self._all_features(seats)
        for module in range(self.drafter.config.num_modules):  # all: rows that stay need their KV
            states, logits = self._run(module, batch, seats, left, states)
            going = [i for i, seat in enumerate(seats) if seat.budget > module]
            if not going:
                continue
            said = logits[torch.from_numpy(lasts[going])]
            self.chooser.choose([seats[i] for i in going], [1] * len(going), said)

    def _run(
        self,
        module: int,
        batch: ForwardBatch,
        seats: Sequence[Seat],
        counts: Sequence[int],
        states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [T, H] and logits [T, U] of a module's rows, from the states before it.

        A request that wants fewer tokens than others goes on with its last one.
        """
        tokens = [
            np.append(seat.context.token_ids, (seat.tokens + seat.tokens[-1:] * module)[:module])[
                first : first + count
            ]
            for seat, count in zip(seats, counts, strict=True)
            for first in [seat.num_held + 1 + module]
        ]
        ids = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
        x = self.drafter.joins[module](self.drafter.embed(ids), states.to(self._dtype))
        found, logits = self.stacks[module].run(batch, x)
        return found.clone(), logits


class HeadsRollout(Rollout[Medusa]):
    """Medusa: heads on the newest features, and no KV at all."""

    def __init__(self, drafter: Medusa, stack: Stack, chooser: Chooser) -> None:
        super().__init__(drafter, stack, chooser)
        self._heads = MedusaHeads(drafter, self._dtype)

    def num_slots(self, budget: int) -> int:
        return 0

    def take_in(self, seat: Seat, count: int) -> None:
        self._features(seat, count)
        seat.num_held += count

    def draft(self, seats: Sequence[Seat]) -> None:
        newest = torch.stack([seat.features[-1] for seat in seats])
        budgets = [seat.budget for seat in seats]
        self.chooser.choose(seats, budgets, self._heads.logits(newest, budgets))


def make_rollout(
    drafter: Drafter, make_stack: Callable[[Drafter], Stack], chooser: Chooser
) -> Rollout[Any]:
    """The rollout of a drafter's kind, with layers made by `make_stack`."""
    if isinstance(drafter, MTP) and drafter.config.num_modules > 1:
        modules = range(drafter.config.num_modules)
        stacks = [make_stack(drafter.module(i)) for i in modules]
        return ModulesRollout(drafter, stacks, chooser)
    stack = make_stack(drafter)
    if isinstance(drafter, DSpark):
        return SequentialBlockRollout(drafter, stack, chooser)
    if isinstance(drafter, DFlash):
        return BlockRollout(drafter, stack, chooser)
    if isinstance(drafter, Masked):
        return MaskedRollout(drafter, stack, chooser)
    if isinstance(drafter, Recurrent):
        return RecurrentRollout(drafter, stack, chooser)
    assert isinstance(drafter, Medusa), type(drafter)
    return HeadsRollout(drafter, stack, chooser)


def _pages(seats: Sequence[Seat]) -> list[np.ndarray]:
    """Page tables of their KV."""
    return [seat.page_table for seat in seats]
