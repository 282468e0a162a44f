"""Decodes prompts with a fixed number of requests under way, and keeps when each token came."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.bench.repetition import loop_start
from outrider.engine.times import StepTimes
from outrider.results import RequestOutput

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of decoding: what came after the first token."""

    num_tokens: int = 0
    num_forwards: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Span") -> "Span":
        return Span(
            self.num_tokens + other.num_tokens,
            self.num_forwards + other.num_forwards,
            self.seconds + other.seconds,
        )


@dataclass(slots=True, kw_only=True)
class Answer:
    """One prompt's answer and when its tokens came."""

    index: int  # of the prompt
    submitted: float  # seconds of perf_counter
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time and tokens of each step
    output: RequestOutput | None = None

    @property
    def token_ids(self) -> list[int]:
        assert self.output is not None
        return self.output.outputs[0].token_ids

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0][0] - self.submitted

    def spans(self) -> tuple[Span, Span]:
        """Decoding before the answer loops, and in the loop; a step counts where it ends."""
        loop = loop_start(self.token_ids)
        end = len(self.token_ids) if loop is None else loop
        spans, written, last = [Span(), Span()], self.arrivals[0][1], self.arrivals[0][0]
        for time, num_tokens in self.arrivals[1:]:
            written += num_tokens
            part = int(written > end)
            spans[part] += Span(num_tokens, 1, time - last)
            last = time
        return spans[0], spans[1]


@dataclass
class Pass:
    """Prompts decoded once by one side."""

    answers: list[Answer]
    seconds: float
    times: StepTimes

    def __add__(self, other: "Pass") -> "Pass":
        times = StepTimes(
            **{
                f.name: getattr(self.times, f.name) + getattr(other.times, f.name)
                for f in fields(StepTimes)
            }
        )
        return Pass([*self.answers, *other.answers], self.seconds + other.seconds, times)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @cached_property
    def spans(self) -> dict[int, tuple[Span, Span]]:
        """By prompt: decoding before the answer loops, and in the loop."""
        return {answer.index: answer.spans() for answer in self.answers}

    @property
    def mean_batch(self) -> float:
        """Requests that got tokens per step: below the batch size while the last ones run out."""
        return sum(len(a.arrivals) for a in self.answers) / max(1, self.times.steps)


def drive(
    llm: "LLM",
    prompts: Sequence[tuple[int, Sequence[int]]],
    params: "SamplingParams",
    batch: int,
) -> Pass:
    """Decode prompts, given as (index, token ids), with `batch` of them under way.

    A request is submitted when one before it has ended, so that its time to the first token is
    what a client would see. Every request has the seed and owner of `params`.
    """
    engine = llm.engine
    before = replace(engine.times)
    waiting = deque(prompts)
    running: dict[str, Answer] = {}
    ended: list[Answer] = []
    started = perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < batch:
                index, token_ids = waiting.popleft()
                running[str(index)] = Answer(index=index, submitted=perf_counter())
                engine.add_request(str(index), token_ids, params)
            for chunk in engine.step():
                answer = running[chunk.request_id]
                answer.arrivals.append((perf_counter(), len(chunk.token_ids)))
                if chunk.result is not None:
                    answer.output = chunk.result
                    ended.append(running.pop(chunk.request_id))
    finally:
        for request_id in running:
            engine.abort(request_id)
    return Pass(ended, perf_counter() - started, _since(before, engine.times))


def _since(before: StepTimes, now: StepTimes) -> StepTimes:
    return StepTimes(
        **{f.name: getattr(now, f.name) - getattr(before, f.name) for f in fields(StepTimes)}
    )
