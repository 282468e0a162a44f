"""The policy of a running engine: replaced between two steps, with a way back.

`LivePolicy` is what the planner is given as its rules. A document is replaced by whoever holds it
(an HTTP request, a signal, a file that changed), from any thread; requests that run go on. A
step sees one policy: a new one counts from the next step on.
"""

import signal
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from time import time
from typing import Any

from outrider.errors import ConfigError
from outrider.policy.restrict import Allowed, LoadFacts, RequestFacts
from outrider.policy.rule_document import PLAIN, compile_policy, load_policy
from outrider.policy.rules import Explanation, RuleSet

KEPT = 10  # versions, the current one included


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One document that was in force, or is."""

    number: int  # counts up, never given twice
    document: Any
    since: float  # seconds since 1970 at which it came into force
    rules: RuleSet


class LivePolicy:
    """Rules that can be exchanged while requests run.

    Args:
        document: to begin with; None: no rules.
        source_names: of the sources that there are; a policy that names another is refused. None:
            not known.

    Raises:
        ConfigError: the document is no policy; the message names the place of the fault.
    """

    def __init__(self, document: Any = None, source_names: Collection[str] | None = None) -> None:
        self._source_names = source_names
        self._lock = RLock()  # a signal may come while the main thread holds it
        self._versions: deque[PolicyVersion] = deque(maxlen=KEPT)
        self._count = 0
        self._load: LoadFacts | None = None
        self._rules = RuleSet()
        self.replace(PLAIN if document is None else document)

    @property
    def current(self) -> PolicyVersion:
        return self._versions[-1]

    @property
    def versions(self) -> list[PolicyVersion]:
        """Those that are kept, the current one last."""
        with self._lock:
            return list(self._versions)

    def compile(self, document: Any) -> RuleSet:
        """The rules of a document that could be put into force.

        Raises:
            ConfigError: the document is no policy, or names a source that there is not.
        """
        return compile_policy(document, self._source_names)

    def replace(self, document: Any) -> PolicyVersion:
        """Put another policy into force from the next step on.

        Raises:
            ConfigError: the document is no policy. The current one stays.
        """
        rules = self.compile(document)
        with self._lock:
            self._count += 1
            version = PolicyVersion(self._count, document, time(), rules)
            self._versions.append(version)
        return version

    def back(self) -> PolicyVersion:
        """Put the version before the current one into force again, and forget the current one.

        Raises:
            ConfigError: there is none.
        """
        with self._lock:
            if len(self._versions) < 2:
                raise ConfigError(
                    f"there is no policy before version {self._versions[-1].number} to go back to"
                )
            self._versions.pop()
            return self._versions[-1]

    def restrict(self, request: RequestFacts, load: LoadFacts) -> Allowed:
        """As `RuleSet.restrict`; the first request of a step settles which version counts."""
        if load is not self._load:
            self._load, self._rules = load, self.current.rules
        return self._rules.restrict(request, load)

    def explain(self, request: RequestFacts, load: LoadFacts) -> Explanation:
        """A dry run of the current version."""
        return self.current.rules.explain(request, load)


class PolicyFile:
    """A policy in a file, read again when it changes or when one asks for it."""

    def __init__(self, path: Path, live: LivePolicy) -> None:
        self.path = path
        self._live = live
        self._seen = self._stamp()

    def reload(self) -> PolicyVersion:
        """Read the file and put it into force.

        Raises:
            ConfigError: it cannot be read or is no policy. The current one stays.
        """
        self._seen = self._stamp()
        return self._live.replace(load_policy(self.path))

    def poll(self) -> PolicyVersion | None:
        """To be called every second or so: reload the file if it is another than before.

        Raises:
            ConfigError: as `reload`, once for each change; a file that is gone is no change.
        """
        stamp = self._stamp()
        if stamp is None or stamp == self._seen:
            return None
        return self.reload()

    def on_hangup(self, report: Callable[[PolicyVersion | ConfigError], None]) -> None:
        """Reload on SIGHUP, where there is one; to be called in the main thread.

        Args:
            report: is told the new version or what was wrong with it; it must not raise.
        """
        number = getattr(signal, "SIGHUP", None)
        if number is None:
            return

        def reload(*_: object) -> None:
            try:
                report(self.reload())
            except ConfigError as error:
                report(error)

        signal.signal(number, reload)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
