"""What a run reports, a JSON object per line: `log.jsonl` in its directory."""

import json
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
        if writes and self._path.exists():
            lines = read_log(directory)
            kept = [line for line in lines if line["step"] <= step and not line.get("final")]
            try:
                with whole_file(self._path) as file:
                    file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
            except OSError as error:
                raise DataError(f"cannot write {self._path}: {error.strerror}") from error

    def add(self, **line: Any) -> None:
        """Write one line, whole.

        Raises:
            DataError: it cannot be written.
        """
        if not self._writes:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
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
