"""Checks of the numbers that users give to sources."""

from outrider.errors import ConfigError


def at_least(name: str, value: object, low: int) -> None:
    """Raise ConfigError unless the value is an integer that is not below `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
