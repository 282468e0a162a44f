"""Checks what is submitted and makes requests of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from outrider.checks import shown
from outrider.drafting.source import DraftContext
from outrider.engine.output import OutputBuilder, TokenizerLike
from outrider.engine.request import Request, RequestGroup, TokenBuffer, read_only
from outrider.errors import PromptError, PromptTooLong, SamplingError
from outrider.grammar import Grammars, GrammarState
from outrider.results import SpeculativeMetrics
from outrider.sampling_params import SamplingParams
from outrider.target.edits import check_against_vocab
from outrider.target.noise import noise_key
from outrider.terms import Terms


@dataclass(slots=True)
class Intake:
    """The door of the engine: what passes can be decoded to its end."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerLike | None
    is_speculative: bool
    grammars: Grammars = field(init=False)

    def __post_init__(self) -> None:
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    clock: Callable[[], float] = perf_counter

    def admit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None,
        prediction: Sequence[int] | None,
        seed: int,
        terms: Terms,
    ) -> RequestGroup:
        """A group of `params.n` requests.

        Raises:
            PromptError: empty, too long for the context, or ids outside the vocabulary.
            SamplingError: ids outside the vocabulary, stop strings without a tokenizer, or a
                grammar that cannot be followed.
            MissingDependency: a grammar, and llguidance is not installed.
        """
        grammar = self._grammar(params)
        ids = self._check_prompt(prompt_token_ids)
        group = RequestGroup(request_id, prompt, ids.tolist(), params, terms)
        group.metrics.arrival_time = self.clock()
        if self.is_speculative:
            group.metrics.speculative_decoding = SpeculativeMetrics()
        predicted = None if prediction is None else read_only(np.array(prediction, np.int32))
        for index in range(params.n):
            state = None if grammar is None else grammar.another()
            group.choices.append(self._choice(group, index, ids, predicted, seed, state))
        return group

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        """The prompt as int32 [n], if all is well; raises as `admit` does."""
        self._grammar(params)
        return self._check_prompt(token_ids)

    def _grammar(self, params: SamplingParams) -> GrammarState | None:
        """What the output follows at its beginning, if all parameters are well."""
        params.check()
        check_against_vocab(params, self.vocab_size, self.eos_token_ids)
        if params.stop_strings and self.tokenizer is None:
            raise SamplingError(
                f"stop strings {params.stop_strings} need a tokenizer, the engine has none"
            )
        if params.structured_outputs is None:
            return None
        return self.grammars.follow(params.structured_outputs)

    def _check_prompt(self, token_ids: Sequence[int]) -> np.ndarray:
        try:
            ids = np.asarray(token_ids)
        except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors on other devices
            ids = np.empty((0, 0))
        if ids.shape == (0,):
            raise PromptError("the prompt is empty; at least one token is needed")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise PromptError(
                f"prompt_token_ids must be a list of integers, got {shown(token_ids)}"
            )
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(wrong):
            raise PromptError(
                f"token id {int(wrong[0])} is outside the vocabulary, "
                f"ids must be in [0, {self.vocab_size})"
            )
        if len(ids) >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; context and KV cache hold "
                f"{self.max_model_len}, of which at least one is for the output"
            )
        return ids.astype(np.int32)

    def _choice(
        self,
        group: RequestGroup,
        index: int,
        ids: np.ndarray,
        prediction: np.ndarray | None,
        seed: int,
        grammar: GrammarState | None,
    ) -> Request:
        params = group.params
        request_id = group.request_id if params.n == 1 else f"{group.request_id}#{index}"
        room = self.max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        key = noise_key(seed, index)
        stream = None
        if self.tokenizer is not None:
            stream = self.tokenizer.stream(params.skip_special_tokens, group.prompt_token_ids)
        tokens = TokenBuffer(ids)
        return Request(
            request_id=request_id,
            index=index,
            group=group,
            tokens=tokens,
            num_prompt_tokens=len(ids),
            max_tokens=max_tokens,
            noise_key=key,
            grammar=grammar,
            output=OutputBuilder(params, max_tokens, self.eos_token_ids, stream),
            context=DraftContext(
                request_id=request_id,
                token_ids=tokens.view(),
                num_prompt_tokens=len(ids),
                params=params,
                noise_key=key,
                prediction=prediction,
                grammar=grammar,
                owner=params.owner,
            ),
        )
