"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def new_file(path: Path) -> tuple[int, str]:
    """An open file beside `path` under a name of its own, as tempfile.mkstemp gives it."""
    return tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place when the block ends well, and else goes.

    Raises:
        OSError: the directory cannot be written, or the disk is full; nothing is left behind.
    """
    handle, name = new_file(path)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's 0o600 would hide it from others
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
