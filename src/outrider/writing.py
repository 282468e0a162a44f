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
    with whole_path(path) as name, open(name, "wb") as file:
        yield file


@contextmanager
def whole_path(path: Path) -> Iterator[str]:
    """The same for what writes to a name: the name of an empty file.

    Raises:
        OSError: as `whole_file`.
    """
    handle, name = new_file(path)
    os.close(handle)
    try:
        yield name
        make_lasting(name)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def make_lasting(path: str | Path) -> None:
    """Bring a file to the disk, and give it the permissions that new files have.

    Those of mkstemp and of safetensors, 0o600, would hide it from others.
    """
    os.chmod(path, 0o666 & ~_umask())
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
