"""Counts what became of drafts: per request and for the whole engine by the same rule."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.source import Draft
from outrider.engine.drafts import depths
from outrider.results import SourceMetrics, SpeculativeMetrics


@dataclass(slots=True)
class DraftOutcome:
    """One request's draft in one step, from proposal to what the user got of it."""

    draft: Draft  # as submitted to the target
    num_accepted_drafts: int = 0  # depth the accept rule reached
    num_emitted_drafts: int = 0  # of these, the ones before the end of the output
    num_new_tokens: int = 0  # emitted in all
    is_greedy: bool = True
    accepted: Sequence[int] = ()  # indices of the accepted draft tokens, by depth
    # By source, depths of tokens outside the vocabulary, and of what followed them.
    unknown_depths: dict[str, list[int]] = field(default_factory=dict)
    causes: dict[str, int] = field(default_factory=dict)  # why proposed tokens were not submitted


def record(metrics: SpeculativeMetrics, outcome: DraftOutcome) -> None:
    """Add one step of one request.

    Tokens outside the vocabulary count as drafted and rejected; tokens left out by plan or
    length were never submitted and appear among the causes only.
    """
    draft, emitted = outcome.draft, outcome.num_emitted_drafts
    metrics.num_target_steps += 1
    metrics.num_output_tokens += outcome.num_new_tokens
    if draft.token_ids:
        metrics.num_spec_steps += 1
        histogram = metrics.acceptance_histogram
        histogram[emitted] = histogram.get(emitted, 0) + 1
        for source, source_depths in _by_source(draft).items():
            _record_drafted(metrics, source, source_depths)
        path = [draft.source_of(i) for i in outcome.accepted] or [draft.source] * emitted
        _record_accepted(metrics, path[:emitted])
        _record_rejected(metrics.rejection_causes, outcome)
    for source, source_depths in outcome.unknown_depths.items():
        _record_drafted(metrics, source, source_depths)
        _add(metrics.rejection_causes, "out_of_vocabulary", len(source_depths))
    for cause, count in outcome.causes.items():
        _add(metrics.rejection_causes, cause, count)


def _by_source(draft: Draft) -> dict[str, list[int]]:
    """Depths of every source's tokens."""
    if not draft.sources:
        return {draft.source: depths(draft)}
    found: dict[str, list[int]] = {}
    for source, depth in zip(draft.sources, depths(draft), strict=True):
        found.setdefault(source, []).append(depth)
    return found


def _record_drafted(metrics: SpeculativeMetrics, source: str, draft_depths: Sequence[int]) -> None:
    split = metrics.per_source.get(source)
    if split is None:
        split = metrics.per_source[source] = SourceMetrics()
    metrics.num_draft_tokens += len(draft_depths)
    split.num_draft_tokens += len(draft_depths)
    drafted = split.draft_tokens_per_position
    missing = max(draft_depths) - len(drafted)
    if missing > 0:
        drafted.extend([0] * missing)
        split.accepted_per_position.extend([0] * missing)
    for depth in draft_depths:
        drafted[depth - 1] += 1


def _record_accepted(metrics: SpeculativeMetrics, path: Sequence[str]) -> None:
    """Sources of the accepted tokens, by depth."""
    metrics.num_accepted_draft_tokens += len(path)
    for position, source in enumerate(path):
        split = metrics.per_source[source]
        split.num_accepted_draft_tokens += 1
        split.accepted_per_position[position] += 1


def _record_rejected(causes: dict[str, int], outcome: DraftOutcome) -> None:
    _add(causes, "stop", outcome.num_accepted_drafts - outcome.num_emitted_drafts)
    rejected = len(outcome.draft) - outcome.num_accepted_drafts
    _add(causes, "target_disagrees" if outcome.is_greedy else "sampled_otherwise", rejected)


def _add(causes: dict[str, int], cause: str, count: int) -> None:
    if count:
        causes[cause] = causes.get(cause, 0) + count
