"""What was measured of every request, as JSON values from which each figure can be computed."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.bench.drive import Answer, Pass
from outrider.results import SpeculativeMetrics

# What a reader wants to know of a step, and the phases of `StepTimes` behind it.
PHASES = {
    "draft": ("plan", "propose"),
    "verify": ("forward", "sample"),
    "other": ("schedule", "pack", "commit"),
}


def pass_record(part: Pass, categories: Sequence[str]) -> dict[str, Any]:
    """One side's round: its wall time, its steps, and its requests by prompt.

    A request's first tokens come with its prompt; `decoding` and `loop` are what came after them,
    before and in text that repeats itself up to its end (tokens, forwards of the target, seconds).
    """
    return {
        "seconds": part.seconds,
        "num_steps": part.times.steps,
        "phase_seconds": phase_seconds(part),
        "requests": [
            _request(answer, part, categories)
            for answer in sorted(part.answers, key=lambda answer: answer.index)
        ],
    }


def phase_seconds(part: Pass) -> dict[str, float]:
    """Seconds of all steps by PHASES."""
    return {
        name: sum(getattr(part.times, phase) for phase in phases) for name, phases in PHASES.items()
    }


def speculation(answer: Answer) -> SpeculativeMetrics:
    """Counts of a request; all zero where it was decoded plainly."""
    assert answer.output is not None
    return answer.output.metrics.speculative_decoding or SpeculativeMetrics()


def _request(answer: Answer, part: Pass, categories: Sequence[str]) -> dict[str, Any]:
    decoding, loop = part.spans[answer.index]
    metrics = speculation(answer)
    return {
        "prompt": answer.index,
        "category": categories[answer.index],
        "num_tokens": len(answer.token_ids),
        "num_first_tokens": answer.arrivals[0][1],
        "first_token_seconds": answer.first_token_seconds,
        "decoding": asdict(decoding),
        "loop": asdict(loop),
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_draft_tokens": metrics.num_accepted_draft_tokens,
        "sources": {name: asdict(one) for name, one in sorted(metrics.per_source.items())},
    }
