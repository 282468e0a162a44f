"""Where outrider keeps what it can make again: converted models and compiled kernels."""

import os
from pathlib import Path

from outrider.errors import ConfigError


def cache_dir(kind: str) -> Path:
    """Directory for one kind of cached thing, made if missing.

    `OUTRIDER_CACHE` names the root; without it, `$XDG_CACHE_HOME/outrider` or
    `~/.cache/outrider`.

    Raises:
        ConfigError: the directory is not there and cannot be made.
    """
    path = Path("~/.cache/outrider") / kind
    try:
        path = _root() / kind
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise ConfigError(
            f"the cache directory {path} cannot be made ({getattr(error, 'strerror', error)}): "
            "expected OUTRIDER_CACHE to name a directory that can be written to"
        ) from error
    return path


def _root() -> Path:
    named = os.environ.get("OUTRIDER_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider"
