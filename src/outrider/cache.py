"""Where outrider keeps what it can make again: converted models and compiled kernels."""

import os
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """Directory for one kind of cached thing, made if missing.

    `OUTRIDER_CACHE` names the root; without it, `$XDG_CACHE_HOME/outrider` or
    `~/.cache/outrider`.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("OUTRIDER_CACHE") or Path(base) / "outrider")
    path = root / kind
    path.mkdir(parents=True, exist_ok=True)
    return path
