"""Checks of what users give to sources: every key of a config has its type and range here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.checks import INT32_MAX, integer, number, shown
from outrider.errors import ConfigError

MAX_DRAFT_TOKENS = 512  # of one draft; nothing is accepted that far ahead
MAX_BYTES = 1 << 50


def at_least(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless the value is an integer that is not below `low` or above `high`."""
    limit = MAX_DRAFT_TOKENS if name == "num_speculative_tokens" else MAX_BYTES
    if isinstance(value, int) and not isinstance(value, bool) and value >= low:
        integer(name, value, low, limit if high is None else high)
        return
    raise ConfigError(f"{name} must be an integer of at least {low}, got {shown(value)}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigError(f"{name} must be a name or the path of a file, got {shown(value)}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {shown(value)}")


def _or_none(check: Callable[[str, object], object]) -> Callable[[str, object], object]:
    def checked(name: str, value: object) -> None:
        if value is not None:
            check(name, value)

    return checked


def _integer(low: int, high: int) -> Callable[[str, object], object]:
    return partial(at_least, low=low, high=high)


def _number(low: float, high: float) -> Callable[[str, object], object]:
    return partial(number, low=low, high=high)


share = _number(0, 1)  # raises ConfigError unless the value is a number in [0, 1]

CHECKS: dict[str, Callable[[str, object], object]] = {
    "num_speculative_tokens": _integer(1, MAX_DRAFT_TOKENS),
    "prompt_lookup_min": _or_none(_integer(1, INT32_MAX)),
    "prompt_lookup_max": _or_none(_integer(1, INT32_MAX)),
    "suffix_decoding_max_cached_requests": _integer(0, INT32_MAX),
    "suffix_decoding_max_tree_depth": _integer(1, INT32_MAX),
    "suffix_decoding_max_spec_factor": _number(0, INT32_MAX),
    "suffix_decoding_min_token_prob": share,
    "min_match": _integer(1, INT32_MAX),
    "min_survival": share,
    "shared_tokens": _integer(0, MAX_BYTES),
    "branches": _integer(1, INT32_MAX),
    "hot_bytes": _integer(0, MAX_BYTES),
    "parallel_drafting": _flag,
    "path": _or_none(_text),
    "model": _or_none(_text),
}
