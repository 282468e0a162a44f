"""The packages that drafters are exchanged with, each in an environment of its own.

python tests/exchange/exchange_peers.py    makes the environments that are not there yet
"""

import os
from pathlib import Path

from outrider.bench.peers.install import install, python_of
from outrider.bench.peers.spec import Peer, peers

# Its own dependencies hold packages for pictures and sound, and an older limit on transformers.
SPECULATORS = Peer(
    name="speculators",
    title="speculators",
    script="",
    model="directory",
    variants={},
    steps=[
        ["install", "torch==2.13.0"],
        ["install", "--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"],
        [
            "install",
            "torch==2.13.0",
            "transformers==5.19.0",
            "datasets==5.1.0",
            "loguru==0.7.3",
            "pydantic-settings",
            "openai",
            "httpx",
            "psutil",
        ],
    ],
)
VLLM = peers()["vllm"]


def peer_python(peer: Peer) -> Path | None:
    """The Python that has the peer: OUTRIDER_PEER_<NAME> names one, else that of the cache."""
    named = os.environ.get(f"OUTRIDER_PEER_{peer.name.upper()}")
    return Path(named) if named else python_of(peer)


if __name__ == "__main__":
    for peer in (SPECULATORS, VLLM):
        if peer_python(peer) is None:
            install(peer, print)
