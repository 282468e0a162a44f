"""Where, when, with what and how numbers were made; and files written whole or not at all."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import outrider
from outrider.errors import ConfigError
from outrider.machine import cpu_name
from outrider.writing import new_file, whole_file

PACKAGE = Path(__file__).parent.parent


def provenance(num_threads: int) -> dict[str, Any]:
    """Command, date, commit, machine and versions, as JSON values."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "threads": num_threads,
        "python": platform.python_version(),
        "versions": {"outrider": outrider.__version__}
        | {name: version(name) for name in ("torch", "transformers", "numpy")},
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file under a name of its own first, so that nobody sees half of it.

    Halves of characters, as names of files may have them, become escapes.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        _make_room(path)
        with whole_file(path) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Make sure, before hours of work, that `write_whole` will do; its directory is made.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        _make_room(path)
        handle, name = new_file(path)
        os.close(handle)
        os.unlink(name)
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a directory")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _make_room(path: Path) -> None:
    """Make the directory of a file."""
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(f"cannot write {path}: {parent} is no directory")
    path.parent.mkdir(parents=True, exist_ok=True)


def _commit() -> str | None:
    """Short hash of the checkout this package runs from, with a mark when it was changed."""
    root = _git("rev-parse", "--show-toplevel")
    if root is None or Path(root) / "src" / "outrider" != PACKAGE:
        return None  # installed; a repository around site-packages is somebody else's
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{_git('rev-parse', '--short', 'HEAD')}{' (changed)' if changed else ''}"


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
