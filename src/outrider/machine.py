"""What this machine is."""

import functools
import platform
from pathlib import Path


@functools.cache
def cpu_facts() -> dict[str, str]:
    """What the system tells of the first processor, by name; empty where it tells nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """Model of the processor, as the system tells it."""
    return cpu_facts().get("model name") or platform.processor()


def cpu_flags() -> frozenset[str]:
    """Its instruction sets, under the names of Linux."""
    facts = cpu_facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())
