"""Files that are read, written, or used for a while: what they are, and nothing left behind."""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from outrider.checks import shown
from outrider.errors import TableError
from outrider.writing import new_file, whole_file

MAGIC = b"ORTABLE\n"  # how every table begins
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def named(path: str | os.PathLike[str]) -> str:
    """A path for a message: bytes that are no UTF-8, and what cannot be printed, escaped."""
    text = os.fspath(path)
    with contextlib.suppress(UnicodeEncodeError):  # a surrogate that stands for no byte
        text = os.fsencode(text).decode("utf-8", "backslashreplace")
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) or "''"


def reason(error: OSError | ValueError) -> str:
    """Why a file could not be used, in words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not a file name"  # a zero byte, or a surrogate that stands for no byte


def kind_of(status: os.stat_result) -> str | None:
    """What a file is if it is not a regular one."""
    if stat.S_ISREG(status.st_mode):
        return None
    return KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")


def open_regular(path: Path) -> BinaryIO:
    """A regular file, opened for reading; nothing else is waited for.

    Raises:
        TableError: it is missing, cannot be read, or is something else.
    """
    try:
        kind = kind_of(os.stat(path))
        if kind is None:  # it may be another file by now
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            kind = kind_of(os.fstat(handle))
            if kind is None:
                return os.fdopen(handle, "rb")
            os.close(handle)
    except (OSError, ValueError) as error:
        raise TableError(f"cannot read the table {named(path)}: {reason(error)}") from error
    raise TableError(f"cannot read the table {named(path)}: expected a regular file, it is {kind}")


def check_output(path: str | os.PathLike[str]) -> Path:
    """Where a table for `path` will be written: links followed, nothing but a table replaced.

    Raises:
        TableError: `path` is something else than a table or an empty file, or its directory is
            missing or cannot be written.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TableError(f"the table to write must be the path of a file, got {shown(path)}")
    if not os.fspath(path):
        raise TableError("the table to write must be the path of a file, got ''")
    try:
        target = Path(os.path.realpath(path))
        _check_replaced(Path(path), target)
        parent = target.parent
        if not parent.exists():
            raise TableError(f"cannot write {named(path)}: no directory {named(parent)}")
        handle, name = new_file(target)  # it can be done
        os.close(handle)
        Path(name).unlink()
    except TableError:  # a ValueError, too
        raise
    except (OSError, ValueError) as error:
        raise TableError(f"cannot write {named(path)}: {reason(error)}") from error
    return target


def _check_replaced(path: Path, target: Path) -> None:
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            parent = named(path.parent)
            raise TableError(f"cannot write {named(path)}: {parent} is not a directory") from error
        raise
    kind = kind_of(status)
    if kind is not None:
        raise TableError(f"cannot write {named(path)}: expected a file or a new name, it is {kind}")
    if not status.st_size:
        return
    with target.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise TableError(
                f"cannot write {named(path)}: it holds something else than a draft table; "
                "give a new name, or remove it first"
            )


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place when the block ends well, and else goes.

    Raises:
        TableError: as `check_output`, or the disk is full.
    """
    target = check_output(path)
    try:
        with whole_file(target) as file:
            yield file
    except OSError as error:
        raise TableError(f"cannot write {named(path)}: {reason(error)}") from error


class Scratch:
    """Temporary files without a name: the system takes them back, however the process ends.

    Args:
        directory: where they are; default: the system's for temporary files.

    Raises:
        TableError: nothing can be written there.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._directory = directory
        self._files = contextlib.ExitStack()
        if directory is not None:
            self.open().close()

    def open(self) -> BinaryIO:
        """A new file, open until `close`."""
        opened = tempfile.TemporaryFile
        try:
            file: Any = self._files.enter_context(opened(dir=self._directory))
        except (OSError, ValueError) as error:
            raise self._failed(error) from error
        return file

    def write(self, file: BinaryIO, array: np.ndarray) -> None:
        """Append an array to a file where that file stands."""
        try:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk left in a buffer
            self._files.close()

    def _failed(self, error: OSError | ValueError) -> TableError:
        directory = self._directory
        if directory is None:
            with contextlib.suppress(FileNotFoundError):
                directory = tempfile.gettempdir()
        where = "" if directory is None else f" in {named(directory)}"
        return TableError(
            f"cannot write temporary files{where}: {reason(error)}; name a directory with room "
            "for them with --temporary"
        )
