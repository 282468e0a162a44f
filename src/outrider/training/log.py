"""What a run reports, a JSON object per line: `log.jsonl` in its directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.writing import whole_file

LOG = "log.jsonl"


class Log:
    """Appends to the log of a run, from a step on.

    Args:
        step: where the run goes on; later lines of a run that was killed are dropped, for they
            come again.
        writes: False in all processes but the first, where nothing is written.
    """

    def __init__(self, directory: Path, step: int, writes: bool = True) -> None:
        self._path = directory / LOG
        self._writes = writes
        self._keep(lambda line: line["step"] <= step)

    def add(self, **line: Any) -> None:
        """Write one line, whole.

        Raises:
            DataError: it cannot be written.
        """
        if not self._writes:
            return
        if line.get("final"):  # of a run that ends again
            self._keep(lambda old: not old.get("final"))
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise DataError(f"cannot write {self._path}: {error.strerror}") from error

    def _keep(self, chosen: Callable[[dict[str, Any]], bool]) -> None:
        if not self._writes or not self._path.exists():
            return
        kept = [line for line in read_log(self._path.parent) if chosen(line)]
        try:
            with whole_file(self._path) as file:
                file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
        except OSError as error:
            raise DataError(f"cannot write {self._path}: {error.strerror}") from error


def read_log(directory: Path) -> list[dict[str, Any]]:
    """All lines up to the first that is none: a kill may have cut the last one.

    Raises:
        DataError: it cannot be read.
    """
    path = directory / LOG
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    lines = []
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines
