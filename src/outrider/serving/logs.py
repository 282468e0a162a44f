"""Logs as JSON lines: one object per call and per event, on standard error.

No prompt, no answer and no key is ever written; `owner` is a digest of the key.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from outrider.serving.errors import to_json

LOGGERS = ("outrider", "uvicorn.error")


class JSONLines(logging.Formatter):
    """time, level, logger, event, and what `extra={"record": …}` adds."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= getattr(record, "record", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return to_json(line).decode()


@contextmanager
def json_logs() -> Iterator[None]:
    """Write the logs of outrider and uvicorn as JSON lines while the block runs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines())
    before = {name: _state(logging.getLogger(name)) for name in LOGGERS}
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for name, (level, propagates) in before.items():
            logger = logging.getLogger(name)
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates


def _state(logger: logging.Logger) -> tuple[int, bool]:
    return logger.level, logger.propagate
