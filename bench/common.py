"""What the benchmark scripts share: their prompts, and what `outrider bench` measures with."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.provenance import provenance
from outrider.bench.timing import alternate, medians, pin, read_bandwidth, seconds

__all__ = ["alternate", "medians", "pin", "provenance", "read_bandwidth", "seconds"]

HERE = Path(__file__).parent
DEFAULT_PROMPTS = HERE / "prompts.jsonl"
CHAT = "chat"  # the category of prompts whose answers repeat little of the prompt


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One user turn and what kind of task it is."""

    category: str
    text: str

    @property
    def conversation(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def read_prompts(paths: Sequence[Path], limit: int | None = None) -> list[BenchPrompt]:
    """First turns of JSONL files with ``turns`` or ``prompt``, evenly thinned to ``limit``."""
    prompts = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            text = entry["turns"][0] if "turns" in entry else entry["prompt"]
            prompts.append(BenchPrompt(entry.get("category", path.stem), text))
    if limit is not None and len(prompts) > limit:
        prompts = [prompts[i * len(prompts) // limit] for i in range(limit)]
    return prompts


def count(text: str) -> int:
    """An option of argparse: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def amount(text: str) -> float:
    """An option of argparse: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
