"""Drafts from a trained drafter: features of the target in, several tokens out, one small forward.

Shape legend: B requests of a call, m tokens with new features, F feature width.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.native import NativeStack, why_not_native
from outrider.drafters.native_heads import input_projection
from outrider.drafters.stack import Stack, TorchStack
from outrider.drafting.chooser import NO_PAGES, Chooser, Seat
from outrider.drafting.options import at_least
from outrider.drafting.own_model import num_kv_pages
from outrider.drafting.rollout import Rollout, make_rollout
from outrider.drafting.source import Draft, DraftContext, DraftSource
from outrider.errors import ConfigError, KVFull
from outrider.target.base import PAGE_SIZE, Target
from outrider.target.kv import KVArena
from outrider.target.sampling import draft_noise_key
from outrider.threads import one_thread

MAX_ROWS = 512  # of one forward: the rows of longer prompts are taken in in portions
SURE = 50.0  # logit of a confidence, at most: beyond it exp leaves the range


@dataclass(slots=True)
class _Request:
    features: list[torch.Tensor] = field(default_factory=list)  # not yet taken in, [m, F] each
    stopped: bool = False  # the text has outgrown the drafter


class NeuralSource(DraftSource):
    """Proposes what a drafter says; its KV goes along with each request's text.

    Rows of KV are made from the target's features of text that is final, so nothing is ever rolled
    back: what a draft writes behind them is overwritten by the next call.

    Args:
        drafter: belongs to this source from now on.
        num_speculative_tokens: longest draft; None: what it was trained for.
        kv_cache_tokens: tokens of KV; None takes what all requests can need, up to 1 GiB.
        rule: the accept rule of the engine; all but "invariant" are told `Draft.probs`.

    `events` counts requests that drafting stopped for because their text is longer than what the
    drafter knows ("context"), and calls without a draft because of "kv".

    Raises:
        ConfigError: more tokens per draft than a drafter of a fixed number can say.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_speculative_tokens: int | None = None,
        *,
        kv_cache_tokens: int | None = None,
        rule: str = "invariant",
    ) -> None:
        config = drafter.config
        most = config.num_draft_tokens
        if num_speculative_tokens is not None:
            at_least("num_speculative_tokens", num_speculative_tokens, 1)
            if num_speculative_tokens > most:
                raise ConfigError(
                    f"num_speculative_tokens must be at most {most}, for which this "
                    f"{config.algorithm} drafter was trained, got {num_speculative_tokens}"
                )
        if kv_cache_tokens is not None:
            at_least("kv_cache_tokens", kv_cache_tokens, PAGE_SIZE)
        self.name = config.algorithm
        self.drafter = drafter.eval()
        self.target_layer_ids = config.target_layer_ids
        self.can_extend = not config.target_layer_ids  # of tokens no forward saw there are none
        self.max_draft_tokens = num_speculative_tokens or most
        self.events: Counter[str] = Counter()
        self._kv_cache_tokens = kv_cache_tokens
        self._rule = rule
        self._requests: dict[str, _Request] = {}
        self._arena = KVArena(1)
        self._rollout: Rollout[Any]
        self._threads: Callable[[], AbstractContextManager[None]] = nullcontext
        self._temperatures = drafter.temperatures.cpu().numpy()
        self._shifts = drafter.shifts.cpu().numpy()

    def bind(self, target: Target, tokenizer: object | None, max_num_seqs: int) -> None:
        """Check that the drafter is of this target, and make room for KV.

        Raises:
            ConfigError: sizes or vocabularies differ; the message names them.
        """
        config = self.drafter.config
        layers = config.target_num_layers
        if not layers:  # of a drafter whose file does not tell
            layers = max([target.num_layers, *(i + 1 for i in config.target_layer_ids)])
        for what, ours, theirs in (
            ("hidden size", config.target_hidden_size, target.hidden_size),
            ("number of layers", layers, target.num_layers),
            ("vocabulary", config.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise ConfigError(
                    f"the {self.name} drafter was made for a target with a {what} of {ours}, "
                    f"{target.name} has {theirs}"
                )
        self.drafter.attach(target.embedding, target.head)
        dtype = target.dtype  # compiled code, and torch on a CPU, are slow or lost in float16
        if target.device.type == "cpu" and dtype == torch.float16:
            dtype = torch.float32
        self.drafter.to(target.device, dtype)
        self.drafter.projection = input_projection(self.drafter, dtype)
        wants_probs = self._rule != "invariant"
        eos = getattr(tokenizer, "eos_token_id", None)
        eos_ids = () if eos is None else (eos,)
        chooser = Chooser(self.drafter.d2t, config.vocab_size, eos_ids, wants_probs)
        self._rollout = make_rollout(self.drafter, make_stack, chooser)
        longest = min(config.max_position, target.max_model_len) + self.max_draft_tokens
        self.kv_lag = self._rollout.lag
        stacks = self._rollout.stacks
        if all(isinstance(stack, NativeStack) for stack in stacks):
            self._threads = one_thread  # torch only copies
        token_bytes = sum(stack.kv_bytes_per_token for stack in stacks)
        num_pages = num_kv_pages(self._kv_cache_tokens, max_num_seqs, longest, token_bytes)
        self._arena = KVArena(num_pages)
        for stack in stacks:
            stack.allocate_kv(num_pages)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft]:
        return self._drafts(contexts, budgets, [len(context.token_ids) for context in contexts])

    def extend(
        self,
        contexts: Sequence[DraftContext],
        chains: Sequence[Sequence[int]],
        budgets: Sequence[int],
    ) -> list[Draft]:
        """Rows of the chains run like those of a text, but their KV is not kept."""
        longer = [
            replace(context, token_ids=np.append(context.token_ids, np.array(chain, np.int32)))
            for context, chain in zip(contexts, chains, strict=True)
        ]
        return self._drafts(longer, budgets, [len(context.token_ids) for context in contexts])

    def held_tokens(self, request_id: str) -> int:
        return self._arena.num_committed(request_id)

    def release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._arena.release(request_id)

    def check_integrity(self) -> None:
        """Assert that KV is held by known requests only, and by one each."""
        self._arena.check_integrity()
        assert set(self._arena.owners) <= set(self._requests), self._arena.owners

    def _drafts(
        self, contexts: Sequence[DraftContext], budgets: Sequence[int], num_final: Sequence[int]
    ) -> list[Draft]:
        """Drafts behind texts of which the first `num_final` tokens are final."""
        with torch.inference_mode(), self._threads():
            asked = zip(contexts, budgets, num_final, strict=True)
            admitted = [self._admit(*each) for each in asked]
            seats = [seat for seat in admitted if seat is not None]
            if seats:
                self._take_in(seats)
                self._rollout.draft(seats)
            for seat, final in zip(admitted, num_final, strict=True):
                if seat is not None:
                    self._commit(seat.context.request_id, final)
        return [Draft() if seat is None else self._draft(seat) for seat in admitted]

    def _admit(self, context: DraftContext, budget: int, num_final: int) -> Seat | None:
        """A seat with KV for what the call writes, or None: no draft this time."""
        request = self._requests.setdefault(context.request_id, _Request())
        if context.features is not None and not request.stopped:
            request.features.append(context.features)
        length = len(context.token_ids)
        budget = min(budget, self.max_draft_tokens)
        # Of a text of one token, which no forward has seen, there are no features.
        if request.stopped or budget <= 0 or (self.target_layer_ids and length < 2):
            return None
        if length + self.drafter.config.num_draft_tokens > self.drafter.config.max_position:
            if num_final < length:
                return None
            request.stopped = True
            request.features.clear()
            self._arena.release(context.request_id)
            self.events["context"] += 1
            return None
        held = self._arena.num_committed(context.request_id)
        rows = length - self._rollout.reach - held
        if rows == 0 and self._rollout.needs_rows:  # asked twice for one text
            return None
        try:
            wanted = rows + self._rollout.num_slots(budget)
            self._arena.reserve(context.request_id, wanted)
        except KVFull:
            self.events["kv"] += 1
            return None
        features = self._features(request, rows, max(0, length - self._rollout.lag - held))
        key = context.noise_key
        if self._rule == "block":
            key = draft_noise_key(key, length)
        pages = self._arena.page_table(context.request_id) if wanted else NO_PAGES
        return Seat(context, budget, key, held, features, pages)

    def _features(self, request: _Request, rows: int, final: int) -> torch.Tensor:
        """Of all rows that run, [m, F]; none for a drafter that reads none.

        Those after the first `final` run once more next time, and are kept.
        """
        if not self.target_layer_ids:
            return torch.empty(rows, 0)
        width = self.drafter.config.feature_size
        features = torch.cat([*request.features, torch.empty(0, width)])
        assert len(features) == rows, (len(features), rows)
        request.features[:] = [features[final:]] if final < rows else []
        return features

    def _take_in(self, seats: list[Seat]) -> None:
        """Run rows of long texts in portions, until what is left fits in one forward."""
        left = [len(seat.features) for seat in seats]
        while sum(left) > max(MAX_ROWS, len(seats) * max(1, self._rollout.lag)):
            i = int(np.argmax(left))
            portion = min(MAX_ROWS, left[i] - max(1, self._rollout.lag))
            self._rollout.take_in(seats[i], portion)
            left[i] -= portion

    def _commit(self, request_id: str, num_final: int) -> None:
        """Keep the KV of the text's rows."""
        new = num_final - self._rollout.lag - self._arena.num_committed(request_id)
        if new > 0:
            self._arena.commit(request_id, new)

    def _draft(self, seat: Seat) -> Draft:
        count = len(seat.tokens)
        logits = np.array(seat.chances) / self._temperatures[:count] + self._shifts[:count]
        logits = np.clip(logits, -SURE, SURE)
        return Draft(
            token_ids=seat.tokens,
            probs=torch.stack(seat.probs) if seat.probs else None,
            confidence=(1 / (1 + np.exp(-logits))).tolist(),
            source=self.name,
        )


def make_stack(drafter: Drafter) -> Stack:
    """What runs the drafter's layers where they lie: compiled where it can be."""
    if why_not_native(drafter) is None:
        return NativeStack(drafter, drafter.norm.weight.dtype)
    return TorchStack(drafter)
