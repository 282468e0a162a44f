"""Checks what sources answer and say of themselves, once, so that nothing after it has to.

What a source of ours answers passes by a few C-level calls (0.6 µs a draft); all else is looked
at item by item, converted where its meaning is clear, and refused where it is not.

Shape legend: n tokens of a draft, V vocabulary.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from outrider.checks import INT32_MAX, integer, shown
from outrider.drafting.source import Draft, DraftSource
from outrider.errors import ConfigError, OutriderError, SourceError

NUMBERS = frozenset((float, int))
LARGE = 1e30  # no confidences come near it
PROBS_TOLERANCE = 1e-3  # of the sum of a distribution: float32 rounding over 10**5 ids is 1e-5


class Fields(NamedTuple):
    """What plans are made with of what a source says of itself."""

    name: str
    target_layer_ids: Sequence[int]
    max_draft_tokens: int
    kv_lag: int


fields_of = attrgetter(*Fields._fields)


def check_source(source: object, num_layers: int) -> None:
    """Refuse what the engine could not work with; the source's own code was not called yet.

    Raises:
        ConfigError: the message names the source, and what was given and expected.
    """
    if isinstance(source, type) and issubclass(source, DraftSource):
        raise ConfigError(
            f"a draft source must be an instance, got the class: write {source.__name__}(...)"
        )
    if not isinstance(source, DraftSource):
        raise ConfigError(f"a draft source must be a DraftSource, got {shown(source)}")
    if not isinstance(source.name, str):
        raise ConfigError(f"the name of a draft source must be text, got {shown(source.name)}")
    what = f"of the draft source {source.name!r}"
    integer(f"max_draft_tokens {what}", source.max_draft_tokens, 0, INT32_MAX)
    integer(f"kv_lag {what}", source.kv_lag, 0, INT32_MAX)
    if not isinstance(source.target_layer_ids, tuple | list):
        raise ConfigError(
            f"target_layer_ids {what} must be a tuple, got {shown(source.target_layer_ids)}"
        )
    for layer in source.target_layer_ids:
        integer(f"a layer in target_layer_ids {what}", layer, -1, num_layers - 1)


def check_answer(
    answer: Any, num_contexts: int, source: str, vocab_size: int, needs_probs: bool
) -> list[Draft]:
    """One well-formed draft per context, with the name of its source.

    Args:
        needs_probs: whether the accept rule computes with `Draft.probs`, whose values are
            checked only then.

    Raises:
        SourceError: the message names the source and what was wrong.
    """
    if not isinstance(answer, list | tuple):
        raise _malformed(source, f"a {type(answer).__name__} instead of a list of drafts")
    if len(answer) != num_contexts:
        raise SourceError(
            f"draft source {source!r} answered {len(answer)} drafts for {num_contexts} contexts"
        )
    drafts: list[Draft] = []
    try:
        for draft in answer:
            if not _is_plain(draft):
                draft = _converted(draft, source)
            if draft.probs is not None and draft.token_ids:
                _check_probs(draft, source, vocab_size, needs_probs)
            draft.source, draft.sources = source, []  # the latter is of drafts that were merged
            drafts.append(draft)
    except OutriderError:
        raise
    except Exception as error:  # of the code of whatever object stands there
        raise _malformed(source, f"looking at it raised {type(error).__name__}: {error}") from error
    return drafts


def _is_plain(draft: Any) -> bool:
    """Whether a draft has lists of plain numbers that fit together.

    The sum of a list tells its types: one float, numpy number or string in it shows.
    """
    if type(draft) is not Draft:
        return False
    ids, confidence, parents = draft.token_ids, draft.confidence, draft.parents
    if not (type(ids) is type(confidence) is type(parents) is list):
        return False
    try:
        if type(sum(ids)) is not int:
            return False
        if confidence:
            if len(confidence) != len(ids) or not NUMBERS.issuperset(map(type, confidence)):
                return False
            if not (min(confidence) >= 0 and sum(confidence) < LARGE):
                return False
        if parents:
            if len(parents) != len(ids) or type(sum(parents)) is not int:
                return False
            for index, parent in enumerate(parents):
                if not -1 <= parent < index:
                    return False
        return True
    except (TypeError, ValueError):  # strings, None, lists; arrays have no truth
        return False


def _converted(draft: Any, source: str) -> Draft:
    """The same draft made of plain lists."""
    if not isinstance(draft, Draft):
        raise _malformed(source, f"{shown(draft)} instead of a Draft")
    ids = _integers(draft.token_ids, "token_ids", source)
    parents = _integers(draft.parents, "parents", source)
    confidence = _listed(draft.confidence, "confidence", source)
    for name, values in (("parents", parents), ("confidence", confidence)):
        if values and len(values) != len(ids):
            raise _malformed(source, f"{len(values)} {name} for {len(ids)} token_ids")
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise _malformed(
                source, f"parents[{index}] is {parent}, expected -1 or the index of a token before"
            )
    for value in confidence:
        if not isinstance(value, Real) or not 0 <= float(value) < LARGE:
            raise _malformed(source, f"confidence must hold probabilities, got {shown(value)}")
    return Draft(ids, parents, draft.probs, [float(value) for value in confidence], source)


def _integers(values: Any, name: str, source: str) -> list[int]:
    listed = _listed(values, name, source)
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _malformed(source, f"{name} must hold integers, got {shown(value)}")
    return [int(value) for value in listed]


def _listed(values: Any, name: str, source: str) -> list[Any]:
    listed = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    if not isinstance(listed, list | tuple):
        raise _malformed(source, f"{name} must be a list, got {shown(values)}")
    return list(listed)


def _check_probs(draft: Draft, source: str, vocab_size: int, needs_probs: bool) -> None:
    probs: Any = draft.probs
    if not isinstance(probs, torch.Tensor):
        raise _malformed(source, f"probs must be a tensor, got {shown(probs)}")
    expected = (len(draft), vocab_size)
    is_plain = probs.is_floating_point() and probs.layout is torch.strided
    if tuple(probs.shape) != expected or not is_plain:
        raise _malformed(
            source,
            f"probs must be floats of the shape {expected}, "
            f"got {probs.dtype} of {tuple(probs.shape)}",
        )
    if needs_probs:
        sums = probs.sum(dim=1, dtype=torch.float64)  # [n]
        if not bool((probs >= 0).all() and ((sums - 1.0).abs() < PROBS_TOLERANCE).all()):
            raise _malformed(
                source,
                f"every row of probs must be at least 0 and sum to 1, got the least value "
                f"{float(probs.min()):.3g} and the sums {[round(s, 3) for s in sums.tolist()]}",
            )


def _malformed(source: str, what: str) -> SourceError:
    return SourceError(f"draft source {source!r} answered a malformed draft: {what}")
