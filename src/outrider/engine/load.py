"""How loaded the engine and its machine are, as rules of a policy see it."""

from collections.abc import Mapping
from pathlib import Path
from time import monotonic

from outrider.engine.scheduler import Schedule, Scheduler
from outrider.policy.restrict import LoadFacts

MEMORY_INTERVAL = 1.0  # seconds between looks at the memory of the machine: 30 µs each
MEMORY_INFO = Path("/proc/meminfo")


class LoadMeter:
    """Makes the `LoadFacts` of a step."""

    def __init__(self) -> None:
        self._memory_usage = 0.0
        self._looked = -MEMORY_INTERVAL

    def facts(
        self, schedule: Schedule, scheduler: Scheduler, health: Mapping[str, float]
    ) -> LoadFacts:
        now = monotonic()
        if now - self._looked >= MEMORY_INTERVAL:
            self._looked, self._memory_usage = now, memory_usage()
        arena = scheduler.arena
        return LoadFacts(
            batch_size=len(schedule.works),
            num_waiting=len(scheduler.waiting),
            kv_usage=1.0 - arena.num_free_pages / arena.num_pages,
            memory_usage=self._memory_usage,
            health=health,
        )


def memory_usage() -> float:
    """Share of the machine's memory in use; 0 where the system does not tell."""
    try:
        lines = MEMORY_INFO.read_text().splitlines()
    except OSError:
        return 0.0
    kilobytes = {
        name: float(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)
    }
    if not kilobytes.get("MemTotal"):
        return 0.0
    return 1.0 - kilobytes.get("MemAvailable", 0.0) / kilobytes["MemTotal"]
