"""The peers: what to install, how to start them, which ways of decoding to measure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

HERE = Path(__file__).parent
RUNNERS = HERE / "runners"
OURSELVES = "outrider"  # runs in this environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One engine, as peers.json describes it."""

    name: str
    title: str
    script: str  # in RUNNERS
    model: str  # what it reads: "directory", "gguf" or "any"
    variants: dict[str, dict[str, Any]]  # options by name; "batch": the largest it takes
    steps: list[Any] = field(default_factory=list)  # of pip, or {"requirements_of", "without"}
    loading: str = ""  # what takes long when it starts
    python: str = ""  # version that it needs, where ours will not do
    build_environment: dict[str, dict[str, str]] = field(default_factory=dict)  # by machine
    environment: dict[str, str] = field(default_factory=dict)
    preload: list[str] = field(default_factory=list)  # shared libraries
    convert: list[str] = field(default_factory=list)  # command that makes its own model format

    @property
    def is_ours(self) -> bool:
        return self.name == OURSELVES


@dataclass(frozen=True, slots=True)
class Side:
    """One peer in one of its variants, on one file or directory."""

    peer: Peer
    variant: str
    dtype: str = "bfloat16"

    @property
    def options(self) -> dict[str, Any]:
        return self.peer.variants[self.variant]

    @property
    def largest_batch(self) -> int | None:
        return self.options.get("batch")

    @property
    def name(self) -> str:
        kind = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"{self.peer.title}{kind}, {self.variant}"


@cache
def peers() -> dict[str, Peer]:
    """All peers by name, outrider first."""
    described = json.loads((HERE / "peers.json").read_text(encoding="utf-8"))
    return {name: Peer(name=name, **values) for name, values in described.items()}


def find_peer(name: str) -> Peer:
    """The peer of this name.

    Raises:
        ConfigError: there is none; the message lists them.
    """
    known = [other for other in peers() if other != OURSELVES]
    if name == OURSELVES:
        raise ConfigError(
            f"{OURSELVES} is measured in every run: a peer must be one of {', '.join(known)}"
        )
    if name not in known:
        raise ConfigError(f"a peer must be one of {', '.join(known)}, got {name!r}")
    return peers()[name]


def find_peers(names: Sequence[str]) -> list[Peer]:
    """The peers of these names, each once."""
    return [find_peer(name) for name in dict.fromkeys(names)]
