"""What the benchmark scripts share: prompts, taking turns, provenance."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import outrider

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


def alternate(rounds: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Results of each side over rounds that change who comes first.

    A slow minute of a shared machine then hits all sides alike, and ratios stay honest.
    """
    results: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        order = list(range(len(sides)))
        for index in order if number % 2 == 0 else reversed(order):
            results[index].append(sides[index]())
    return results


def medians(results: Sequence[Sequence[float]]) -> list[float]:
    """Median of each side."""
    return [median(result) for result in results]


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = perf_counter()
    action()
    return perf_counter() - started


def pin(num_threads: int) -> None:
    """Give this process as many cores as threads, where the system can."""
    torch.set_num_threads(num_threads)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:num_threads])


def read_bandwidth(num_bytes: int = 512 << 20, repeats: int = 5) -> float:
    """Bytes per second of summing a buffer far beyond the caches (torch, all threads), best."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    torch.sum(buffer)
    return num_bytes / min(seconds(lambda: torch.sum(buffer)) for _ in range(repeats))


def provenance(num_threads: int) -> dict[str, Any]:
    """Where, when, with what and how the numbers were made."""
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "machine": platform.machine(),
        "threads": num_threads,
        "python": platform.python_version(),
        "versions": {"outrider": outrider.__version__}
        | {name: version(name) for name in ("torch", "transformers")},
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def _commit() -> str | None:
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
