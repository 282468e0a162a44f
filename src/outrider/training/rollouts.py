"""What the engine accepts of a source's drafts: prompts decoded, drafts all of one length.

What is decoded in a loop, where a small model repeats itself up to the end, is easy to draft and
counted apart.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from outrider.bench.drive import Pass
from outrider.bench.intervals import per_step_interval
from outrider.bench.repetition import loop_start

ALL = "all"


@dataclass(frozen=True, slots=True)
class Share:
    """An estimate with its interval over prompts."""

    value: float
    low: float
    high: float


@dataclass(slots=True)
class Acceptance:
    """Of the prompts of one category, before their answers loop."""

    category: str
    num_prompts: int
    num_steps: int  # forwards of the target behind the prompt's
    length: Share  # tokens per step, with the one that the target adds
    # By depth: chance of acceptance, given all before it; up to the last one that a step came to.
    conditional: list[float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Loops:
    """Answers that end in a loop."""

    num_answers: int
    num_looping: int
    token_share: float  # of what was decoded
    length: float | None  # tokens per step in the loops


@dataclass(slots=True)
class Rollouts:
    """All of one evaluation."""

    kinds: list[Acceptance]  # by category, then all together
    loops: Loops
    tokens_per_second: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def acceptance(passed: Pass, categories: Sequence[str], depths: int, seed: int = 0) -> Rollouts:
    """The numbers of decoded prompts.

    Args:
        passed: what `drive` gives.
        categories: by prompt index.
        depths: draft tokens per step, most.
    """
    steps = {answer.index: _steps(answer.token_ids, answer.arrivals) for answer in passed.answers}
    names = sorted({categories[index] for index in steps})
    groups = {name: [i for i in sorted(steps) if categories[i] == name] for name in names}
    if len(groups) > 1:
        groups[ALL] = sorted(steps)
    kinds = [
        _kind(name, [steps[index] for index in members], depths, seed)
        for name, members in groups.items()
    ]
    return Rollouts(kinds, _loops(passed), passed.num_tokens / max(1e-9, passed.seconds))


def _steps(token_ids: Sequence[int], arrivals: Sequence[tuple[float, int]]) -> np.ndarray:
    """Tokens of each step behind the prompt's that ended before the answer loops, int64 [S]."""
    loop = loop_start(token_ids)
    end = len(token_ids) if loop is None else loop
    counts = np.array([count for _, count in arrivals], np.int64)
    ended = counts.cumsum()
    return counts[1:][ended[1:] <= end]


def _kind(name: str, steps: list[np.ndarray], depths: int, seed: int) -> Acceptance:
    tokens = np.array([counts.sum() for counts in steps], np.float64)
    numbers = np.array([len(counts) for counts in steps], np.float64)
    joined = np.concatenate(steps)
    # A step of n tokens accepted n - 1; the last one of an answer may have been cut by its end.
    whole = np.concatenate([counts[:-1] for counts in steps])
    reached = [int((whole > depth).sum()) for depth in range(depths + 1)]  # falling
    return Acceptance(
        category=name,
        num_prompts=len(steps),
        num_steps=len(joined),
        length=_ratio(tokens, numbers, seed),
        conditional=[after / before for before, after in itertools.pairwise(reached) if before],
    )


def _ratio(tokens: np.ndarray, steps: np.ndarray, seed: int) -> Share:
    """Tokens per step over all prompts, with its bootstrap interval over prompts."""
    value = float(tokens.sum() / max(1.0, steps.sum()))
    return Share(value, *per_step_interval(tokens, steps, seed))


def _loops(passed: Pass) -> Loops:
    outside, inside = zip(*passed.spans.values(), strict=True)
    looped = sum(span.num_tokens for span in inside)
    forwards = sum(span.num_forwards for span in inside)
    decoded = looped + sum(span.num_tokens for span in outside)
    return Loops(
        num_answers=len(inside),
        num_looping=sum(span.num_tokens > 0 for span in inside),
        token_share=looped / max(1, decoded),
        length=looped / forwards if forwards else None,
    )
