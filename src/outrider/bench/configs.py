"""The speculative configs of one bench, each under a name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.checkpoints.find import algorithm_at
from outrider.checks import shown
from outrider.cli.options import parse_speculative_config
from outrider.drafting.build import check_config, split_rule
from outrider.errors import ConfigError, OutriderError

PLAIN = "plain"  # the side that every config is held against
LONGEST_NAME = 40  # characters; names are columns and legends
# Of "=" in a config nothing is taken for a name: JSON begins with a bracket, a file with "@".
NAMED = re.compile(r"""([^\[{@"=]*)=(.*)""", re.DOTALL)


def parse_configs(values: Sequence[str]) -> dict[str, Any]:
    """Configs by name, in the order given: ``NAME=CONFIG``, or ``CONFIG`` named by its methods.

    CONFIG is what `parse_speculative_config` reads.

    Raises:
        ConfigError: a config or a name that cannot be used, or a name twice; says which.
    """
    configs: dict[str, Any] = {}
    for name, config in map(_read, values):
        if name in configs:
            raise ConfigError(
                f"--speculative-config needs a name of its own for every config, got {name!r} "
                "twice: give names as NAME=CONFIG"
            )
        configs[name] = config
    return configs


def _read(value: str) -> tuple[str, Any]:
    found = NAMED.fullmatch(value.strip())
    name = None if found is None else _checked(found[1].strip())
    text = value if found is None else found[2]
    if not text.strip():
        raise ConfigError(f"--speculative-config {shown(value)} has no config behind its name")
    with naming(name):
        config = parse_speculative_config(text)
        if config is None:
            raise ConfigError(
                "bench needs drafts: --speculative-config is 'none', expected another; plain "
                "decoding is measured beside every config"
            )
    with naming(name or text):
        check_config(config)
        return name or _checked(default_name(config)), config


def default_name(config: Any) -> str:
    """What a config without a name is called: its methods, joined by a plus sign."""
    config, _ = split_rule(config)
    parts = [config] if isinstance(config, str | Mapping) else config
    assert isinstance(parts, Sequence), parts
    return "+".join(map(_method, parts))[:LONGEST_NAME]


@contextmanager
def naming(name: str | None) -> Iterator[None]:
    """Say of which config an error is.

    Raises:
        ConfigError: instead of any other error of outrider's.
    """
    try:
        yield
    except OutriderError as error:
        if name is None:
            raise
        raise ConfigError(f"speculative config {shown(name)}: {error}") from error


def _method(part: str | Mapping[str, Any]) -> str:
    """The method of one source, or its class; else that of the drafter named, or its file."""
    if isinstance(part, str):
        return part
    if "method" in part:
        return part["method"].rpartition(":")[2]
    return algorithm_at(part["model"]) or Path(part["model"]).name


def _checked(name: str) -> str:
    fits = 0 < len(name) <= LONGEST_NAME and name.isprintable() and "," not in name
    if not fits or name == PLAIN:
        raise ConfigError(
            f"the name of a speculative config must be 1 to {LONGEST_NAME} printable characters "
            f"without a comma, and not {PLAIN!r}, got {shown(name)}: give one as NAME=CONFIG"
        )
    return name
