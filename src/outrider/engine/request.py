"""The state of one request: its text so far and what is to become of it. No tensors, no queues."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from outrider.drafting.source import DraftContext
from outrider.engine.output import OutputBuilder
from outrider.grammar import GrammarState
from outrider.results import CompletionOutput, RequestMetrics, RequestOutput
from outrider.sampling_params import SamplingParams
from outrider.target.prefixes import PageKeys
from outrider.terms import Terms


class TokenBuffer:
    """int32 tokens that grow by doubling, so that a view of all of them costs nothing."""

    __slots__ = ("_data", "_length", "_shown")

    def __init__(self, token_ids: Sequence[int] | np.ndarray) -> None:
        self._length = len(token_ids)
        self._data = np.empty(max(64, 2 * self._length), np.int32)
        self._data[: self._length] = token_ids
        self._shown = read_only(self._data)

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: Sequence[int]) -> None:
        end = self._length + len(token_ids)
        if end > len(self._data):
            grown = np.empty(2 * end, np.int32)
            grown[: self._length] = self._data[: self._length]
            self._data, self._shown = grown, read_only(grown)
        self._data[self._length : end] = token_ids
        self._length = end

    def view(self) -> np.ndarray:
        """All tokens, int32 [n], which cannot be written to; not to be kept over an `extend`."""
        return self._shown[: self._length]


def read_only(array: np.ndarray) -> np.ndarray:
    """A view of the array that raises when it is written to; so do slices of it."""
    view = array.view()
    view.flags.writeable = False
    return view


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one prompt: what the scheduler, the sources and the arena know as a request."""

    request_id: str  # of this choice; the prompt's own id is `group.request_id`
    index: int
    group: "RequestGroup"
    tokens: TokenBuffer  # prompt and output
    num_prompt_tokens: int
    max_tokens: int  # the user's limit, or what the context leaves
    noise_key: int  # uint64 of (seed, choice)
    output: OutputBuilder
    context: DraftContext
    grammar: GrammarState | None = None
    status: Status = Status.WAITING
    order: int = 0  # place in the order of arrival, given by the scheduler
    page_keys: PageKeys = field(init=False)  # by which others find its KV

    def __post_init__(self) -> None:
        self.page_keys = PageKeys(self.owner)

    @property
    def params(self) -> SamplingParams:
        return self.group.params

    @property
    def terms(self) -> Terms:
        return self.group.terms

    @property
    def owner(self) -> str:
        return self.group.params.owner

    @property
    def arrival(self) -> float:
        """On the clock of the scheduler, in seconds."""
        return self.group.metrics.arrival_time

    @property
    def has_deadline(self) -> bool:
        return self.group.terms.deadline is not None

    @property
    def due(self) -> float:
        """When its last token is wanted; infinity without a deadline."""
        return self.group.terms.due(self.arrival)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def draft_room(self) -> int:
        """Longest draft that can be of use: the target adds one token itself."""
        return self.max_tokens - self.num_output_tokens - 1

    def completion(self) -> CompletionOutput:
        return self.output.completion(
            self.index, self.tokens.view()[self.num_prompt_tokens :].tolist()
        )


@dataclass(slots=True, eq=False)
class RequestGroup:
    """What the user submitted: one prompt, `params.n` choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    terms: Terms = field(default_factory=Terms)
    choices: list[Request] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def finished(self) -> bool:
        return all(choice.status is Status.FINISHED for choice in self.choices)

    def result(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[choice.completion() for choice in self.choices],
            finished=self.finished,
            metrics=self.metrics,
        )
