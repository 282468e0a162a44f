"""The requests of one call to a trained drafter, and how their tokens are chosen.

Shape legend: B seats of a call, R rows that say a token, F features, U vocabulary of the drafter,
V of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.drafting.source import DraftContext
from outrider.target.sampling import RowGroup, draw_drafts, target_probs

NO_PAGES = np.zeros(0, np.int32)


@dataclass(slots=True)
class Seat:
    """One request in the course of one call."""

    context: DraftContext
    budget: int  # tokens to draft
    noise_key: int
    num_held: int  # rows of the text whose KV the drafter has
    features: torch.Tensor  # [m, F] of the rows from there on
    page_table: np.ndarray = field(default_factory=lambda: NO_PAGES)
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # logit of being accepted, per token
    probs: list[torch.Tensor] = field(default_factory=list)  # [V] each token was drawn from

    def token_at(self, place: int, count: int) -> np.ndarray:
        return self.context.token_ids[place : place + count]


class Chooser:
    """Turns logits of the drafter into draft tokens, with the noise of the target's choice."""

    def __init__(
        self,
        d2t: torch.Tensor,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        wants_probs: bool,
    ) -> None:
        self._d2t = d2t
        self._id_map = d2t.cpu().numpy().astype(np.int32)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._wants_probs = wants_probs

    def choose(self, seats: Sequence[Seat], counts: Sequence[int], logits: torch.Tensor) -> None:
        """Append to each seat its next `counts[i]` tokens, of rows that follow each other."""
        firsts = np.cumsum([0, *counts]).tolist()
        groups = [
            self._group(seat, first, count)
            for seat, first, count in zip(seats, firsts, counts, strict=False)
        ]
        wide = None
        if self._wants_probs or any(group.needs_edits for group in groups):
            # Edits and distributions speak of the target's ids.
            wide = logits.new_full((len(logits), self._vocab_size), -torch.inf)
            wide[:, self._d2t] = logits
        if wide is None:
            tokens, probs = draw_drafts(logits, groups, self._id_map)
        else:
            tokens, probs = draw_drafts(wide, groups)
        self.take(seats, counts, tokens, logits_of(probs))
        for seat, group in zip(seats, groups, strict=True):
            if wide is not None and self._wants_probs and not seat.context.params.is_greedy:
                seat.probs += list(target_probs(wide, group))

    def settings(self, seats: Sequence[Seat]) -> bytes | None:
        """How compiled code samples every token of a draft: a ROW of target/rows.py for each,
        nothing where all are the most likely ones; None: it cannot, `choose` has to."""
        if self.are_plain(seats):
            return b""
        groups = [self._group(seat, 0, seat.budget) for seat in seats]
        if self._wants_probs or any(group.needs_edits for group in groups):
            return None
        return b"".join(row for group in groups for row in group.packed(0, 0))

    def are_plain(self, seats: Sequence[Seat]) -> bool:
        """True when every seat's next token is the drafter's most likely one as it is."""
        return all(
            seat.context.params.is_greedy and not self._group(seat, 0, 1).needs_edits
            for seat in seats
        )

    def take(
        self, seats: Sequence[Seat], counts: Sequence[int], tokens: np.ndarray, chances: np.ndarray
    ) -> None:
        """Append tokens chosen elsewhere, int32 [R], and logits of their chances, float32 [R]."""
        said, sure, first = tokens.tolist(), chances.tolist(), 0
        for seat, count in zip(seats, counts, strict=True):
            seat.tokens += said[first : first + count]
            seat.chances += sure[first : first + count]
            first += count

    def _group(self, seat: Seat, first_row: int, count: int) -> RowGroup:
        text = seat.context.token_ids
        if seat.tokens:
            text = np.concatenate([text, np.array(seat.tokens, np.int32)])
        return RowGroup(
            seat.context.params,
            seat.noise_key,
            text,
            seat.context.num_prompt_tokens,
            first_row,
            draft_ids=[-1] * (count - 1),
            eos_token_ids=self._eos_token_ids,
        )


def logits_of(probs: np.ndarray) -> np.ndarray:
    """log(p / (1 - p)), float32 [R], finite at 0 and 1 too."""
    sure = np.clip(probs, 1e-6, 1 - 1e-6)
    return np.log(sure / (1 - sure))
