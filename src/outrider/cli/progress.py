"""Says what a long start does: the first one converts the model and compiles the kernels."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_SECONDS = 2.0  # a start shorter than this says nothing
HINT = "Loading the model …"


@contextmanager
def start_up(quiet: bool = False) -> Iterator[None]:
    """Show progress on stderr while the body runs, if it takes longer than two seconds.

    What outrider logs meanwhile, as the conversion of a model, becomes the text of the spinner,
    and a line where there is no terminal. Quiet leaves only warnings.
    """
    from outrider.cli.console import messages

    console = messages()
    status = console.status(HINT)

    def show() -> None:
        if console.is_terminal:
            status.start()
        else:
            sys.stderr.write(HINT + "\n")

    def update(text: str) -> None:
        if console.is_terminal:
            status.update(text)
        else:
            sys.stderr.write(f"outrider: {text}\n")

    timer = threading.Timer(QUIET_SECONDS, show)
    timer.daemon = True
    handler = _StatusHandler((lambda _: None) if quiet else update)
    logger = logging.getLogger("outrider")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        status.stop()
        logger.removeHandler(handler)
        logger.setLevel(level)


class _StatusHandler(logging.Handler):
    """Sends log lines to a spinner, and warnings to stderr."""

    def __init__(self, update: Callable[[str], None]) -> None:
        super().__init__()
        self._update = update

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            sys.stderr.write(f"outrider: {record.getMessage()}\n")
        else:
            self._update(record.getMessage())
