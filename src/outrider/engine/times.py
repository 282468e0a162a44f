"""Where the time of the steps goes, so that the engine's own share can be read."""

from dataclasses import dataclass
from time import perf_counter


@dataclass(slots=True)
class StepTimes:
    """Seconds per phase, summed over `steps`. `propose` is the calls into sources alone."""

    schedule: float = 0.0
    plan: float = 0.0
    propose: float = 0.0
    pack: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    commit: float = 0.0
    steps: int = 0
    _mark: float = 0.0

    def begin(self) -> None:
        self.steps += 1
        self._mark = perf_counter()

    def lap(self, phase: str) -> float:
        """Count the seconds since the last mark for this phase, and return them."""
        now = perf_counter()
        seconds = now - self._mark
        self._mark = now
        setattr(self, phase, getattr(self, phase) + seconds)
        return seconds

    def move(self, from_phase: str, to_phase: str, seconds: float) -> None:
        """Count seconds of one phase for another one, in whose midst they were spent."""
        setattr(self, from_phase, getattr(self, from_phase) - seconds)
        setattr(self, to_phase, getattr(self, to_phase) + seconds)

    @property
    def total(self) -> float:
        return self.overhead + self.forward + self.propose

    @property
    def overhead(self) -> float:
        """Seconds outside the target's forward and the sources."""
        return self.schedule + self.plan + self.pack + self.sample + self.commit
