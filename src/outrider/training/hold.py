"""One command at a time in a directory: two would mix their files."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.errors import DataError

# What training writes whole, and the name that it has until it is, see outrider.writing.
OWN = (
    r"(?:data|features|run)\.json|(?:tokens|features)-\d+\.safetensors|state\.pt|log\.jsonl|"
    r"curve\.png|drafter"
)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other commands out of a directory, which is made, and goes again where it stays empty.

    Nothing is left in it: the system frees it with the process, however that ends. What processes
    that were killed had not written to the end is deleted.

    Raises:
        DataError: another process holds it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"cannot write to {directory}: {error.strerror}") from error
    try:
        if _lock(handle, directory):
            _delete_left_overs(directory)
        try:
            yield
        finally:
            with suppress(OSError):
                directory.rmdir()
    finally:
        os.close(handle)


def _delete_left_overs(directory: Path) -> None:
    """Delete what killed processes were writing; a drafter that was being replaced comes back."""
    for path in directory.iterdir():
        found = re.fullmatch(rf"\.({OWN})\.[a-z0-9_]{{8}}", path.name)
        if found is None:
            continue
        with suppress(OSError):
            if (path / "old").exists() and not (directory / found[1]).exists():
                (path / "old").rename(directory / found[1])
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _lock(handle: int, directory: Path) -> bool:
    """Whether nobody else can hold it now; False on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        raise DataError(
            f"another process is writing to {directory}: wait for it, or give another directory"
        ) from None
    except OSError:
        return False
