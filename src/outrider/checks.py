"""Checks of what users give: type and range in one sentence, and the plain value back.

numpy's numbers are as good as Python's; a bool is no number. Nothing heavy is imported here.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from outrider.errors import ConfigError, UserError

INT32_MAX = 2**31 - 1


def shown(value: object, most: int = 80) -> str:
    """The value for an error message, whatever it is and however long."""
    try:
        text = repr(value)
    except Exception:  # an int of 5000 digits, a list nested 100 000 deep, a __repr__ that fails
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= most else text[: most - 1] + "…"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as `object_pairs_hook`: a key given twice leaves open which is meant.

    Raises:
        ConfigError: to be put behind the name of the document.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ConfigError(f"holds the key {shown(twice)} twice in one object")
    return found


def too_long_integer() -> str:
    """What JSON holds that is well formed, and of which `json.loads` raises a plain ValueError."""
    return f"holds an integer of more than {sys.get_int_max_str_digits()} digits"


def integer(
    name: str,
    value: object,
    low: int,
    high: int | None = None,
    error: type[UserError] = ConfigError,
) -> int:
    """The value as an int in [low, high]; None: no upper limit."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name} must be an integer{_of(low, high)}, got {shown(value)}")
    found = int(value)
    if found < low or (high is not None and found > high):
        raise error(f"{name} must be an integer{_of(low, high)}, got {shown(found)}")
    return found


def number(
    name: str,
    value: object,
    low: float,
    high: float,
    error: type[UserError] = ConfigError,
    open_low: bool = False,
) -> float:
    """The value as a finite float in [low, high], or (low, high] with `open_low`."""
    limits = f"in {'(' if open_low else '['}{low}, {high}]"
    if high >= sys.float_info.max:
        limits = f"a finite number {'above' if open_low else 'of at least'} {low:g}"
    message = f"{name} must be {limits}, got {shown(value)}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name} must be a number, got {shown(value)}")
    try:
        found = float(value)
    except OverflowError as overflow:  # 10**400
        raise error(message) from overflow
    inside = (low < found if open_low else low <= found) and found <= high
    if not inside or math.isinf(found):  # NaN fails every comparison
        raise error(message)
    return found


def boolean(name: str, value: object, error: type[UserError] = ConfigError) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {shown(value)}")
    return value


def token_ids(name: str, values: Any, error: type[UserError] = ConfigError) -> list[int]:
    """A list of ints from any sequence or one-dimensional array of integers, none below 0."""
    listed = values
    if not isinstance(values, Sequence) and callable(getattr(values, "tolist", None)):
        listed = values.tolist()  # an array or a tensor
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes | bytearray | memoryview):
        raise error(f"{name} must be a list of token ids, got {shown(values)}")
    if set(map(type, listed)) == {int} and min(listed) >= 0:  # a million of them in 20 ms
        return list(listed)
    return [integer(f"a token id in {name}", value, 0, None, error) for value in listed]


def _of(low: int, high: int | None) -> str:
    return f" of at least {low}" if high is None else f" in [{low}, {high}]"
