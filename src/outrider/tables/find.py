"""Tables that wait for a tokenizer: named by the environment, in the cache, or shipped."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import outrider
from outrider.cache import cache_dir
from outrider.errors import ConfigError, TableError
from outrider.tables.files import named, reason
from outrider.tables.format import Table

log = logging.getLogger("outrider")
DIRECTORY_VARIABLE = "OUTRIDER_TABLES"
SUFFIX = ".table"


def directories() -> Iterator[Path]:
    """Where tables are looked for, the first one before the others.

    Raises:
        ConfigError: the environment names no directory.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        yield _directory(given)
    yield cache_dir("tables")
    yield Path(outrider.__file__).parent / "pretrained"


def _directory(given: str) -> Path:
    path = Path(os.path.expanduser(given))
    try:
        with os.scandir(path):
            return path
    except OSError as error:
        raise ConfigError(
            f"{DIRECTORY_VARIABLE} must name a directory with draft tables, got {named(given)}: "
            f"{reason(error)}"
        ) from error


def find_table(fingerprint: str) -> Table | None:
    """The first table made for this tokenizer; a damaged one is passed over with a warning.

    Raises:
        ConfigError: as `directories`.
    """
    for directory in directories():
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            try:
                table = Table(path)
            except TableError as error:
                log.warning("%s", error)
                continue
            if table.fingerprint == fingerprint:
                return table
    return None
