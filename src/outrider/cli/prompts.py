"""Where prompts come from: an argument, standard input, or a JSONL file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.checks import shown, too_long_integer, unique_keys
from outrider.errors import ConfigError, PromptError
from outrider.text import check_unicode

Message = dict[str, str]
STDIN = "-"
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(slots=True)
class PromptRecord:
    """One entry to answer: user turns, after the messages that come before them."""

    turns: list[str]
    before: list[Message]
    label: str = ""

    @property
    def text(self) -> str:
        """The first user turn, which is all there is of a plain prompt."""
        return self.turns[0]


def gather(arguments: list[str], file: Path | None) -> list[PromptRecord]:
    """Prompts of a command line; ``-`` stands for all of standard input.

    Raises:
        PromptError: nothing given, or the file does not hold prompts.
    """
    records = [PromptRecord([_read_stdin() if p == STDIN else p], []) for p in arguments]
    for record in records:
        _check_text(record, "a prompt")
    if file is not None:
        records += read_jsonl(file)
    if not records:
        raise PromptError("no prompt given: pass one as argument, '-' for stdin, or --file JSONL")
    return records


def read_jsonl(path: Path) -> list[PromptRecord]:
    """Records of a JSONL file; each line holds ``prompt``, ``turns`` or ``messages``."""
    return parse_jsonl(read_once(path), file_name(path))


def read_once(path: Path) -> bytes:
    """All that a file, a pipe or (``-``) standard input holds; a pipe gives it only once."""
    try:
        return sys.stdin.buffer.read() if str(path) == STDIN else path.read_bytes()
    except OSError as error:
        raise PromptError(f"cannot read {file_name(path)}: {error.strerror or error}") from error


def file_name(path: Path) -> str:
    """What messages call it."""
    return "standard input" if str(path) == STDIN else str(path)


def parse_jsonl(data: bytes, name: str) -> list[PromptRecord]:
    """Records of the lines of a JSONL file.

    Raises:
        PromptError: a line is no record (the message has its number), or there is none.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise PromptError(
            f"cannot read {name}:{number}: expected UTF-8, got the byte "
            f"0x{data[error.start]:02x} ({error.reason})"
        ) from error
    # Not splitlines(): JSON strings may hold U+2028 and other line ends of Unicode.
    records = [
        _record(line, f"{name}:{number}")
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not records:
        raise PromptError(f"{name} holds no prompts")
    return records


def _record(line: str, where: str) -> PromptRecord:
    try:
        entry = json.loads(line, object_pairs_hook=unique_keys)
    except ConfigError as error:  # of the hook
        raise PromptError(f"{where}: {error}") from error
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{where}: not valid JSON at column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise PromptError(f"{where}: cannot be read as JSON: {error}") from error
    except ValueError as error:
        raise PromptError(f"{where}: {too_long_integer()}") from error
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: expected a JSON object, got {line[:40]!r}")
    record = _turns(entry, where)
    record.label = _label(entry, where)
    _check_text(record, f"{where}: a prompt")
    return record


def _turns(entry: dict[str, Any], where: str) -> PromptRecord:
    """What is to be answered, under one of the three keys."""
    if len(given := [key for key in ("prompt", "turns", "messages") if key in entry]) > 1:
        raise PromptError(f"{where}: expected one of 'prompt', 'turns' and 'messages', got {given}")
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise PromptError(f"{where}: 'prompt' must be text, got {shown(entry['prompt'])}")
        return PromptRecord([entry["prompt"]], [])
    for key, kind, kinds in (("turns", str, "texts"), ("messages", dict, "objects")):
        if key in entry:
            if not _is_list_of(entry[key], kind):
                raise PromptError(
                    f"{where}: {key!r} must be a list of {kinds}, at least one, "
                    f"got {shown(entry[key])}"
                )
            given = entry[key]
            return PromptRecord(given, []) if kind is str else _from_messages(given, where)
    raise PromptError(
        f"{where}: expected 'prompt' (text), 'turns' (list of texts) or 'messages' "
        f"(list of objects), got the keys {shown(sorted(entry))}"
    )


def _label(entry: dict[str, Any], where: str) -> str:
    label = entry.get("category", "")
    # Tables, plots and JSON show it: no line ends, control characters or halves of characters.
    if not isinstance(label, str) or not label.isprintable():
        raise PromptError(f"{where}: 'category' must be printable text, got {shown(label)}")
    return label.strip()


def _check_text(record: PromptRecord, what: str) -> None:
    # A chat template wraps even nothing into tokens, and the model makes something up.
    if not all(turn.strip() for turn in record.turns):
        raise PromptError(f"{what} is empty: expected text, got {shown(record.turns)}")
    for text in [*record.turns, *(message["content"] for message in record.before)]:
        check_unicode(text, what)


def _from_messages(messages: list[Any], where: str) -> PromptRecord:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise PromptError(
                f"{where}: each message needs 'role' and 'content' as text, got {shown(message)}"
            )
        if message["role"] not in ROLES:
            raise PromptError(
                f"{where}: a role must be one of {', '.join(ROLES)}, got {shown(message['role'])}"
            )
    if messages[-1]["role"] != "user":
        raise PromptError(
            f"{where}: the last message must be the user's, got {messages[-1]['role']!r}"
        )
    return PromptRecord([messages[-1]["content"]], messages[:-1])


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text: {error}") from error
