"""One command at a time in a directory: two would mix their files."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.errors import DataError


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other commands out of a directory, which is made, and goes again where it stays empty.

    Nothing is left in it: the system frees it with the process, however that ends.

    Raises:
        DataError: another process holds it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"cannot write to {directory}: {error.strerror}") from error
    try:
        _lock(handle, directory)
        try:
            yield
        finally:
            with suppress(OSError):
                directory.rmdir()
    finally:
        os.close(handle)


def _lock(handle: int, directory: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"another process is writing to {directory}: wait for it, or give another directory"
        ) from None
    except OSError:
        pass  # a file system without locks
