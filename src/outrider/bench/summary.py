"""From passes to numbers: rates, speed-ups, acceptance, phases. Nothing here runs a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from outrider.bench.drive import Pass, Span
from outrider.bench.intervals import per_step_interval
from outrider.bench.records import pass_record, phase_seconds, speculation
from outrider.bench.run import Measured
from outrider.bench.timing import Spread, spread
from outrider.results import SourceMetrics, SpeculativeMetrics

ALL = "all"


@dataclass(slots=True)
class Side:
    """One way of decoding at one batch size; spreads are over rounds."""

    tokens_per_second: Spread  # output tokens over wall time, prompts included
    decode_tokens_per_second: Spread | None  # of one request after its first token, loops left out
    first_token_seconds: Spread  # median over the prompts
    milliseconds_per_step: dict[str, float]  # by phase, prompt steps included, median
    mean_batch: float  # requests that got tokens per step
    draft_share: float  # of the time of a step, median


@dataclass(slots=True)
class Kind:
    """Prompts of one category; what is decoded in loops is left out."""

    category: str
    num_prompts: int
    plain: Spread | None  # decoded tokens per second of one request; None: nothing but loops
    speculative: Spread | None
    speedup: Spread | None  # of each round
    acceptance_length: float | None  # tokens per target decode forward, skipped drafts counted
    acceptance_interval: tuple[float, float] | None  # of the length, over prompts
    draft_acceptance_rate: float | None  # of draft tokens; loops included


@dataclass(slots=True)
class Loops:
    """Answers that end in a loop, of the speculative side."""

    num_answers: int
    num_looping: int
    token_share: float  # of the decoded tokens
    acceptance_length: float | None  # in the loops
    speedup: float | None  # in the loops


@dataclass(slots=True)
class Source:
    """What one source drafted, summed over rounds."""

    name: str
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Accepted and drafted tokens at each place of a draft."""
        return list(zip(self.accepted_per_position, self.drafted_per_position, strict=True))


@dataclass(slots=True)
class Measurement:
    """Everything about one config at one batch size (or context length, or forced acceptance).

    Configs that took turns share what is said of plain decoding.
    """

    config: str  # its name
    batch: int
    num_prompts: int
    plain: Side
    speculative: Side
    speedup: Spread  # of output tokens over wall time, round by round
    decode_speedup: Spread | None  # of one request after its first token, loops left out
    acceptance_length: float | None  # tokens per target decode forward, loops left out
    acceptance_interval: tuple[float, float] | None  # of the length, over prompts
    kinds: list[Kind]
    loops: Loops
    sources: list[Source]
    rejection_causes: dict[str, int] = field(default_factory=dict)
    input_tokens: tuple[int, int] = (0, 0)  # shortest and longest prompt
    context_tokens: int | None = None  # of a context-length sweep
    forced_acceptance: float | None = None  # of a speed-only run
    rounds: list[dict[str, Any]] = field(default_factory=list)  # `pass_record` of each side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.plain, self.speculative


def summarise(
    measured: Measured,
    categories: Sequence[str],
    lengths: Sequence[int],
    config: str = "",
    side: int = 1,
) -> Measurement:
    """The numbers of one side at one batch size.

    Args:
        categories: by prompt index.
        lengths: tokens of the prompts that were decoded.
        config: name of the config.
        side: its place among the sides.
    """
    plain, speculative = measured.sides[0], measured.sides[side]
    total = SpeculativeMetrics()
    for answer in (answer for part in speculative for answer in part.answers):
        add(total, speculation(answer))
    indices = [answer.index for answer in plain[0].answers]
    ratios = [
        b.num_tokens / b.seconds / (a.num_tokens / a.seconds)
        for a, b in zip(plain, speculative, strict=True)
    ]
    whole = _kind(ALL, indices, plain, speculative)
    names = sorted({categories[index] for index in indices})
    return Measurement(
        config=config,
        batch=measured.batch,
        num_prompts=len(indices),
        plain=_side(plain),
        speculative=_side(speculative),
        speedup=spread(ratios),
        decode_speedup=whole.speedup,
        acceptance_length=whole.acceptance_length,
        acceptance_interval=whole.acceptance_interval,
        kinds=[
            _kind(name, [i for i in indices if categories[i] == name], plain, speculative)
            for name in names
        ],
        loops=_loops(plain, speculative),
        sources=[_source(name, one) for name, one in sorted(total.per_source.items())],
        rejection_causes=dict(sorted(total.rejection_causes.items())),
        input_tokens=(min(lengths), max(lengths)),
        rounds=[
            {"plain": pass_record(a, categories), "speculative": pass_record(b, categories)}
            for a, b in zip(plain, speculative, strict=True)
        ],
    )


def add(total: SpeculativeMetrics, part: SpeculativeMetrics) -> None:
    """Add the counts of one request to a total."""
    for name in (
        "num_target_steps",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "num_output_tokens",
    ):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    _add_counts(total.acceptance_histogram, part.acceptance_histogram)
    _add_counts(total.rejection_causes, part.rejection_causes)
    for name, one in part.per_source.items():
        mine = total.per_source.setdefault(name, SourceMetrics())
        mine.num_draft_tokens += one.num_draft_tokens
        mine.num_accepted_draft_tokens += one.num_accepted_draft_tokens
        _add_list(mine.draft_tokens_per_position, one.draft_tokens_per_position)
        _add_list(mine.accepted_per_position, one.accepted_per_position)


def _add_counts(mine: dict[Any, int], theirs: dict[Any, int]) -> None:
    for key, count in theirs.items():
        mine[key] = mine.get(key, 0) + count


def _add_list(mine: list[int], theirs: Sequence[int]) -> None:
    mine.extend([0] * (len(theirs) - len(mine)))
    for index, count in enumerate(theirs):
        mine[index] += count


def _side(rounds: Sequence[Pass]) -> Side:
    first = [median(a.first_token_seconds for a in part.answers) for part in rounds]
    indices = [answer.index for answer in rounds[0].answers]
    phases = [(phase_seconds(part), part) for part in rounds]
    return Side(
        tokens_per_second=spread([part.num_tokens / part.seconds for part in rounds]),
        decode_tokens_per_second=_rates(rounds, indices),
        first_token_seconds=spread(first),
        milliseconds_per_step={
            name: 1e3 * median(one[name] / max(1, p.times.steps) for one, p in phases)
            for name in phases[0][0]
        },
        mean_batch=median(part.mean_batch for part in rounds),
        draft_share=median(one["draft"] / (sum(one.values()) or 1.0) for one, _ in phases),
    )


def _kind(
    category: str, indices: Sequence[int], plain: Sequence[Pass], speculative: Sequence[Pass]
) -> Kind:
    slow, fast = _rates(plain, indices), _rates(speculative, indices)
    kept = drafted = 0
    for part in speculative:
        for answer in (answer for answer in part.answers if answer.index in indices):
            metrics = speculation(answer)
            drafted += metrics.num_draft_tokens
            kept += metrics.num_accepted_draft_tokens
    return Kind(
        category=category,
        num_prompts=len(indices),
        plain=slow,
        speculative=fast,
        speedup=None
        if slow is None or fast is None
        else spread([b / a for a, b in zip(slow.values, fast.values, strict=True)]),
        acceptance_length=_per_forward(_outside(part, indices) for part in speculative),
        acceptance_interval=_interval(speculative, indices),
        draft_acceptance_rate=kept / drafted if drafted else None,
    )


def _rates(rounds: Sequence[Pass], indices: Sequence[int]) -> Spread | None:
    """Decoded tokens per second of one request, loops left out; None where nothing is left."""
    spans = [_outside(part, indices) for part in rounds]
    if not all(span.num_tokens and span.seconds for span in spans):
        return None
    return spread([span.num_tokens / span.seconds for span in spans])


def _outside(part: Pass, indices: Iterable[int]) -> Span:
    return sum((part.spans[index][0] for index in indices), Span())


def _inside(part: Pass) -> Span:
    return sum((loop for _, loop in part.spans.values()), Span())


def _per_forward(spans: Iterable[Span]) -> float | None:
    total = sum(spans, Span())
    return total.num_tokens / total.num_forwards if total.num_forwards else None


def _interval(rounds: Sequence[Pass], indices: Sequence[int]) -> tuple[float, float] | None:
    """Of tokens per forward; rounds repeat a prompt's drafts, so that each prompt counts once."""
    spans = [sum((part.spans[index][0] for part in rounds), Span()) for index in indices]
    if not any(span.num_forwards for span in spans):
        return None
    return per_step_interval([s.num_tokens for s in spans], [s.num_forwards for s in spans])


def _loops(plain: Sequence[Pass], speculative: Sequence[Pass]) -> Loops:
    slow, fast = (sum(map(_inside, rounds), Span()) for rounds in (plain, speculative))
    spans = [pair for part in speculative for pair in part.spans.values()]
    decoded = sum(outside.num_tokens + inside.num_tokens for outside, inside in spans)
    both = slow.num_tokens and fast.num_tokens and slow.seconds and fast.seconds
    return Loops(
        num_answers=len(spans),
        num_looping=sum(inside.num_tokens > 0 for _, inside in spans),
        token_share=fast.num_tokens / max(1, decoded),
        acceptance_length=fast.num_tokens / fast.num_forwards if fast.num_forwards else None,
        speedup=(fast.num_tokens / fast.seconds) / (slow.num_tokens / slow.seconds)
        if both
        else None,
    )


def _source(name: str, metrics: SourceMetrics) -> Source:
    return Source(
        name,
        metrics.num_draft_tokens,
        metrics.num_accepted_draft_tokens,
        metrics.draft_tokens_per_position,
        metrics.accepted_per_position,
    )
